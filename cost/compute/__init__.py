"""Seconds of operations: FLOPs, bytes and the roofline."""
