"""Runs the actions of a pipeline schedule on one rank."""
