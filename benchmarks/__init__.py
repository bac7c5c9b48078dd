"""Figures to commit: each module is a command that prints a table, or JSON with ``--json``."""
