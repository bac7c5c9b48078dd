"""Prices of operations in seconds: FLOPs, bytes and the roofline."""
