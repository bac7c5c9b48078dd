"""Figures that follow from a plan and the hardware that it was made for."""

from __future__ import annotations

from collections import Counter

import torch

from autopar.cluster.description import Cluster
from autopar.ir.graph_text import parse_type
from autopar.placement.predicted import devices_flops
from autopar.plans.plan import Plan


def device_flops(plan: Plan, cluster: Cluster) -> float:
    """FLOP/s of products of a device, on average: what a step that did nothing else would do, relative to which the
    plan's MFU counts."""
    devices = plan.stage_meshes.devices
    return devices_flops(cluster, devices, _working_dtype(plan)) / devices


def _working_dtype(plan: Plan) -> torch.dtype:
    """The dtype in which most elements of parameters are read."""
    elements = Counter[torch.dtype]()
    for node in plan.nodes.values():
        kind = parse_type(node.type.partition(", stored ")[0], {}) if node.op == "param" else None
        if kind is not None:
            elements[kind.dtype] += int(kind.numel)
    return max(elements, key=elements.__getitem__, default=torch.float32)
