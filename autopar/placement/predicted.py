"""The figures and lines of a plan, from its cost breakdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autopar.cluster.description import Cluster
from autopar.cost import family_of, total_flops, working_dtype
from autopar.ir.graph import Graph
from autopar.ir.node import Node, TensorType
from autopar.ir.placements import short
from autopar.ir.plan_record import PlanLine, Predicted, ReshardStep

from .breakdown import CostBreakdown, CostLine
from .formulation import Instance
from .memory_bound import Memory


def predicted(
    breakdown: CostBreakdown, instance: Instance, cluster: Cluster, memory: Memory | None = None
) -> Predicted:
    """The figures of a cost breakdown. ``memory`` replaces its memory if a better figure is known."""
    compute, seconds, memory = (
        breakdown.seconds_of("compute", "optimizer"),
        breakdown.seconds,
        memory or breakdown.memory,
    )
    dtype = dtype_of(instance.graph)
    possible = devices_flops(cluster, instance.prices.devices, dtype) * seconds
    return Predicted(
        step_seconds=seconds,
        compute_seconds=compute,
        comm_seconds=seconds - compute,
        bubble_seconds=0.0,
        **memory_figures(memory),
        mfu=float(total_flops(instance.graph)) / possible if possible else 0.0,
    )


def devices_flops(cluster: Cluster, devices: int, dtype: torch.dtype) -> float:
    """FLOPs a second of the first ``devices`` together."""
    if not cluster.groups:
        return devices * cluster.device.flops(dtype)
    return sum(cluster.at(rank, 1).device.flops(dtype) for rank in range(devices))


def dtype_of(graph: Graph) -> torch.dtype:
    """The dtype in which a step computes."""
    return graph.once("working dtype", lambda: working_dtype(list(_operations(graph))))


def _operations(graph: Graph) -> Iterator[tuple[str, list[TensorType], TensorType]]:
    """Parameters and products, as far as a plan keeps them: the first result of each operation and of each node that it
    takes."""
    for node in graph.nodes:
        if node.op == "param" or family_of(node.op).matrix is not None:
            taken = (_first_type(graph[name]) for name in dict.fromkeys(value.node for value in node.operands))
            if (result := _first_type(node)) is not None:
                yield node.op, [kind for kind in taken if kind is not None], result


def _first_type(node: Node) -> TensorType | None:
    return next(filter(None, node.types), None)


def memory_figures(memory: Memory) -> dict[str, Any]:
    """The memory figures of a prediction, by field."""
    return {
        "peak_bytes": memory.peak,
        "weight_bytes": memory.weights,
        "gradient_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
        "activation_bytes": memory.activations,
        "temporary_bytes": memory.temporary,
        "input_bytes": memory.inputs,
        "host_bytes": memory.host,
        "nvme_bytes": memory.nvme,
    }


def plan_line(line: CostLine) -> PlanLine:
    steps = tuple(
        ReshardStep(
            hop.kind, hop.axes, short(hop.source), short(hop.target), hop.collective.bytes if hop.collective else 0
        )
        for hop in line.hops
    )
    return PlanLine(line.kind, line.name, line.module, line.phase, line.seconds, steps, line.times)
