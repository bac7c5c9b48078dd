"""Traces code that selects rows by a mask, as Python loops over experts do."""
