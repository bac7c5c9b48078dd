"""Kernels: which operations of a graph run as one, and what each reads and writes."""
