"""Prices: seconds of computing and communicating, FLOPs and bytes, and the memory there is, for a described
cluster.

Formulas, their sources and what they leave out: ``docs/cost-model.md``.
"""

from .collective import bucketed_seconds, bytes_sent, check_mesh, collective_seconds, fan_out
from .compute import bytes_moved, compute_seconds, flops, node_seconds, total_bytes, total_flops
from .memory import reserve, usable_bytes, usable_host_bytes
from .operations import FAMILIES, Family, family_of
from .pipeline import Simulation, simulate
from .pipeline_bounds import bubble_fraction, step_lower_bound
from .pipeline_prices import ChunkPrice, EdgePrice, PipelinePrices

__all__ = [
    "FAMILIES",
    "ChunkPrice",
    "EdgePrice",
    "Family",
    "PipelinePrices",
    "Simulation",
    "bubble_fraction",
    "bucketed_seconds",
    "bytes_moved",
    "bytes_sent",
    "check_mesh",
    "collective_seconds",
    "compute_seconds",
    "family_of",
    "fan_out",
    "flops",
    "node_seconds",
    "reserve",
    "simulate",
    "step_lower_bound",
    "total_bytes",
    "total_flops",
    "usable_bytes",
    "usable_host_bytes",
]
