"""Solvers of placement programs: exact and local, reductions, bounds. They know nothing of graphs."""
