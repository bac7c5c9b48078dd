"""Compiled calls: kinds of calls, their checks, and programs that run them."""
