"""Strategies of every operation, and which nodes choose alike."""
