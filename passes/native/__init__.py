"""Runs torch's own kernels where the operations they were decomposed into are not sharded across."""
