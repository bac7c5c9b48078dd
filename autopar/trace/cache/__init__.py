"""Caches traces on disk: their keys and their text."""
