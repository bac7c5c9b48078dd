"""Prices for a described cluster: seconds of computation and communication, FLOPs and bytes, and the memory that a plan
may use.

``docs/cost-model.md`` gives the formulas, their sources, and what they leave out.
"""

from autopar.cost.collective.collective import bucketed_seconds, bytes_sent, check_mesh, collective_seconds, fan_out
from autopar.cost.compute.op_families import FAMILIES, Family, family_of
from autopar.cost.compute.roofline import bytes_moved, compute_seconds, flops, node_seconds, total_bytes, total_flops
from autopar.cost.compute.working_dtype import products_dtype, working_dtype
from autopar.cost.pipeline.bounds import bubble_fraction, step_lower_bound
from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices
from autopar.cost.pipeline.simulate import Simulation, simulate

from .memory import reserve, usable_bytes, usable_host_bytes, usable_nvme_bytes

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
    "products_dtype",
    "reserve",
    "simulate",
    "step_lower_bound",
    "total_bytes",
    "total_flops",
    "usable_bytes",
    "usable_host_bytes",
    "usable_nvme_bytes",
    "working_dtype",
]
