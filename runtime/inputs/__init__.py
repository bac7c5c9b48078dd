"""Batches: global, local to ranks, and samplers."""
