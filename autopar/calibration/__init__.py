"""Measuring hardware: what this machine, or a job on a cluster, runs at, and the rates fitted to it."""
