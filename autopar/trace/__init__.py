"""Traces a call of a model as a graph."""
