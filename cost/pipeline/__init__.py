"""Prices of pipelines in seconds: simulation of schedules, and bounds."""
