"""Traces kept on disk: their keys and their text."""
