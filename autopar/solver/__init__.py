"""Solvers of placement programs: exact and local, reductions, bounds. They are independent of graphs."""
