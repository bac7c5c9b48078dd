"""Starts processes on this machine, forked from a clean template: a fork of this one would lack torch's threads."""
