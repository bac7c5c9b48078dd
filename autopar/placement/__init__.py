"""The placement program of a graph: its choices, costs and constraints, and what a chosen placement costs."""
