"""Prices of single parameters and operations, which the placement program and the cost breakdown of its answer
share."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch.distributed.tensor import Partial

from autopar.cost import collective_seconds
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.ir.node import SAVED_ACTIVATION, VIEWS, Node, TensorType, Value
from autopar.ir.placements import Placements, Strategy
from autopar.optimizers import optimizer_bytes

from .prices import Prices, local_bytes, local_type


def optimizer_seconds(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> float:
    """One update of a parameter: reads value, gradient and states, writes value and states; of a
    scaled loss it also looks for what overflowed in the gradient, reads it again to divide it, and writes it."""
    shard = local_type(node.stored, place.optimizer, prices.mesh)
    moved = (6 if node.is_scaled else 3) * int(shard.bytes) + 2 * int(optimizer_bytes(optimizer, shard))
    return moved / prices.cluster.device.updates


def agreement_seconds(prices: Prices, graphs: Iterable[Graph], stages: int = 1) -> float:
    """All devices of all ``stages`` telling each other, once a step, whether a gradient of the scaled loss overflowed.
    ``graphs`` make up the step."""
    if not any(node.is_scaled for graph in graphs for node in graph.placeholders("param")):
        return 0.0
    mesh = (stages, *prices.mesh)
    axes = tuple(axis for axis, devices in enumerate(mesh) if devices > 1)
    return collective_seconds(prices.cluster, mesh, "all_reduce", axes, torch.float32.itemsize) if axes else 0.0


def casting_seconds(prices: Prices, node: Node, place: ParameterPlacement) -> float:
    """Making, once a step, the copy of a stored parameter that the graph reads in another dtype."""
    if node.stored == node.type:
        return 0.0
    moved = sum(local_bytes(kind, place.optimizer, prices.mesh) for kind in (node.stored, node.type))
    device = prices.cluster.device
    return device.launch_seconds + moved / device.memory_bandwidth


def parameter_bytes(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> tuple[int, int, int]:
    """Bytes on a device of (weights, gradients, optimizer state) of one trained parameter. A working weight kept beside
    the stored shard, elsewhere or in another dtype, counts as weight; state in host memory does not count."""
    shard = local_type(node.stored, place.optimizer, prices.mesh)
    apart = place.weight != place.optimizer or node.stored != node.type
    working = local_bytes(node.type, place.weight, prices.mesh) if apart else 0
    gradient = local_bytes(node.stored, place.gradient, prices.mesh)
    state = 0 if place.offload else int(optimizer_bytes(optimizer, shard))
    return int(shard.bytes) + working, gradient, state


def offloaded_bytes(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> int:
    """Bytes of a parameter's optimizer state that rest in host memory, and visit the device while it is updated."""
    return (
        int(optimizer_bytes(optimizer, local_type(node.stored, place.optimizer, prices.mesh))) if place.offload else 0
    )


def offload_seconds(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> float:
    """To bring the state of a parameter to the device and back, one after the other: a parameter's update lasts
    nothing beside that."""
    count, device = offloaded_bytes(prices, node, place, optimizer), prices.cluster.device
    return 2 * (device.launch_seconds + count / device.host_bandwidth) if count else 0.0


def temporary_bytes(prices: Prices, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy) -> int:
    """What one operation holds at once: its operands and results, as placed by the strategy."""
    if node.is_placeholder or node.op in VIEWS or node.op == SAVED_ACTIVATION:
        return 0
    taken = sum(local_bytes(t, p, prices.mesh) for t, p in zip(inputs, strategy.inputs, strict=True))
    made = zip(node.types, strategy.outputs, strict=True)
    return taken + sum(local_bytes(t, p, prices.mesh) for t, p in made if t is not None)


def adding_seconds(
    prices: Prices, node: Node, strategy: Strategy, made: Container[Value | None], repeats: Repeats
) -> float:
    """What it takes in a step to add up the gradients that ``node`` makes (those of its results that are in ``made``)
    over microbatches: each after the first is read with the sum so far, which is written. A product adds by itself: it
    reads the sum and writes that instead of its result."""
    places = enumerate(zip(node.types, strategy.outputs, strict=True))
    raw = sum(local_bytes(t, p, prices.mesh) for i, (t, p) in places if t and Value(node.name, i) in made)
    passes = 1.0 if node.op == "aten.mm.default" else 3.0
    return passes * raw * (repeats.microbatches - 1) / prices.cluster.device.memory_bandwidth


def accumulator_bytes(prices: Prices, kind: TensorType, raw: Placements, repeats: Repeats) -> int:
    """Bytes in which a gradient made as a partial sum is added up over microbatches, beside the reduced gradient; one
    that is not is added up where it rests."""
    if not repeats.accumulates or not any(isinstance(place, Partial) for place in raw):
        return 0
    return local_bytes(kind, raw, prices.mesh)
