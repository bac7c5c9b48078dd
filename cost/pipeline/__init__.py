"""Seconds of a pipeline: simulation of schedules, and bounds."""
