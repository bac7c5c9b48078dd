"""Measures the hardware of this machine, or of a job on a cluster, and fits rates to it."""
