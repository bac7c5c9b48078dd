"""Cuts of a graph into the chunks of a pipeline, and microbatches."""
