"""Compiles the calls of a parallel module: traces, plans, and lowers a program for each kind of call."""
