"""Faults: who waits for whom, errors that name it, and leaving when asked to."""
