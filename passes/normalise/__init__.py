"""Passes that bring a traced graph into normal form, one a file."""
