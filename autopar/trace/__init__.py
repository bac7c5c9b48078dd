"""From a model and a call to a graph."""
