"""Decompositions of operations while a model is traced."""
