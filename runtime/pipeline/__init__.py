"""Runs the instructions of a pipeline schedule on one rank."""
