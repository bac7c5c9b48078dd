"""Prices of single parameters and operations, shared by the placement program and the cost breakdown of its
solution."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch.distributed.tensor import Partial

from autopar.cost import collective_seconds
from autopar.cost.compute.roofline import accumulating_seconds
from autopar.cost.update import casting_seconds, update_seconds
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.ir.node import CAST, SAVED_ACTIVATION, VIEWS, Node, TensorType, Value
from autopar.ir.placements import Placements, Strategy
from autopar.layout import MASTER_BYTES
from autopar.offload import NVME_PIECE
from autopar.ops.write_rows import WRITE_ROWS
from autopar.optimizers import optimizer_bytes

from .prices import Prices, local_bytes, local_type


def optimizer_seconds(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> float:
    """Seconds of one update of a parameter. It reads value, gradient and states, and writes value and states. With a
    scaled loss, it also reads the gradient to check for overflow, reads it again to divide it, and writes it."""
    shard = local_type(node.stored, place.optimizer, prices.mesh)
    value, gradient_passes = int(shard.bytes), 4 if node.is_scaled else 1
    states = int(optimizer_bytes(optimizer, shard))
    return update_seconds(prices.cluster.device, gradient_passes * value, value, states)


def agreement_seconds(prices: Prices, graphs: Iterable[Graph], mesh: tuple[int, ...] = ()) -> float:
    """Seconds in which all devices agree, once a step, whether a gradient of the scaled loss has overflowed. ``graphs``
    make up the step; ``mesh``: that of all devices, if it is not that of ``prices``."""
    if not any(node.is_scaled for graph in graphs for node in graph.placeholders("param")):
        return 0.0
    mesh = mesh or prices.mesh
    axes = tuple(axis for axis, devices in enumerate(mesh) if devices > 1)
    return collective_seconds(prices.cluster, mesh, "all_reduce", axes, torch.float32.itemsize) if axes else 0.0


def working_copy_seconds(prices: Prices, node: Node, place: ParameterPlacement) -> float:
    """Seconds to cast a stored parameter, once a step, if the graph reads it in another dtype."""
    if node.stored == node.type:
        return 0.0
    stored, copy = (local_bytes(kind, place.optimizer, prices.mesh) for kind in (node.stored, node.type))
    return casting_seconds(prices.cluster.device, stored, copy)


def parameter_bytes(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> tuple[int, int, int]:
    """Bytes (weights, gradients, optimizer state) of one trained parameter: of the last two on a device, of weights
    wherever they rest. State in another tier does not count."""
    shard = local_type(node.stored, place.optimizer, prices.mesh)
    gradient = local_bytes(node.stored, place.gradient, prices.mesh)
    state = 0 if place.offload else int(optimizer_bytes(optimizer, shard))
    return weight_bytes(prices, node, place), gradient, state


def weight_bytes(prices: Prices, node: Node, place: ParameterPlacement) -> int:
    """Bytes of the stored shard of a parameter, and of its working copy if that has other placements or another
    dtype."""
    has_working_copy = place.weight != place.optimizer or node.stored != node.type
    working = local_bytes(node.type, place.weight, prices.mesh) if has_working_copy else 0
    return local_bytes(node.stored, place.optimizer, prices.mesh) + working


def weight_swap_seconds(prices: Prices, node: Node, place: ParameterPlacement, repeats: Repeats, phases: int) -> float:
    """Seconds in a step to bring a weight that rests in host memory to the device, once in each of ``phases`` (forward,
    backward) of every microbatch. It is read ahead, but none of that is counted as hidden; backward is counted for all,
    though it does not read tables and biases. A working copy is written there once a step."""
    device, count = prices.cluster.device, local_bytes(node.type, place.weight, prices.mesh)
    has_working_copy = place.weight != place.optimizer or node.stored != node.type
    return device.host_transfer(count) * (phases * repeats.microbatches + has_working_copy)


def offloaded_bytes(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> int:
    """Bytes of a parameter's optimizer state that rest in another tier, and are on the device while it is updated."""
    return (
        int(optimizer_bytes(optimizer, local_type(node.stored, place.optimizer, prices.mesh))) if place.offload else 0
    )


def disk_pieces(prices: Prices, node: Node, place: ParameterPlacement) -> int:
    """The pieces in which state on a disk is read, updated and written (:data:`autopar.offload.NVME_PIECE`)."""
    return max(1, -(-int(local_type(node.stored, place.optimizer, prices.mesh).numel) // NVME_PIECE))


def piece_bytes(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> int:
    """The most bytes of a parameter's state in another tier that are on the device at once while it is updated: all of
    that in host memory, a piece of that on a disk."""
    count = offloaded_bytes(prices, node, place, optimizer)
    if place.offload != "nvme":
        return count
    elements = int(local_type(node.stored, place.optimizer, prices.mesh).numel)
    return -(-count * min(NVME_PIECE, elements) // max(elements, 1))


def offload_seconds(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> float:
    """Seconds to move the state of a parameter to the device and then back. From host memory nothing of it is hidden,
    since the update itself is negligible in comparison. The disk reads and writes other pieces while one is updated and
    moves between host and device, so of the two only what takes longer counts."""
    count, device = offloaded_bytes(prices, node, place, optimizer), prices.cluster.device
    if not count:
        return 0.0
    visits = disk_pieces(prices, node, place) if place.offload == "nvme" else 1
    moving = 2 * visits * device.host_transfer(count / visits) if device.has_host else 0.0
    if place.offload != "nvme":
        return moving
    disk = visits * (device.nvme_read(count / visits) + device.nvme_write(count / visits))
    return max(disk - optimizer_seconds(prices, node, place, optimizer), moving)


def swap_seconds(prices: Prices, node: Node, strategy: Strategy, repeats: Repeats) -> float:
    """Seconds in a step to move a saved activation to host memory and back, in every microbatch. None of it is assumed
    to be hidden, though a device that copies by itself goes on computing."""
    count = local_bytes(node.type, strategy.outputs[0], prices.mesh)
    return 2 * prices.cluster.device.host_transfer(count) * repeats.microbatches


def temporary_bytes(prices: Prices, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy) -> int:
    """Bytes that one operation holds at once: its operands and results, as placed by the strategy."""
    if node.is_placeholder or node.op in VIEWS or node.op == SAVED_ACTIVATION:
        return 0
    return prices.of_call(
        "temporary bytes", node, inputs, strategy, lambda: _temporary_bytes(prices, node, inputs, strategy)
    )


def _temporary_bytes(prices: Prices, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy) -> int:
    if node.op == WRITE_ROWS:  # It writes into the cache, which is counted where it rests.
        return prices.held(inputs[-1], strategy.inputs[-1])
    operands = sum(prices.held(t, p) for t, p in zip(inputs, strategy.inputs, strict=True))
    results = zip(node.types, strategy.outputs, strict=True)
    return operands + sum(prices.held(t, p) for t, p in results if t is not None)


def adding_seconds(
    prices: Prices,
    node: Node,
    inputs: tuple[TensorType, ...],
    strategy: Strategy,
    gradients: Container[Value | None],
    repeats: Repeats,
) -> float:
    """Seconds in a step to accumulate the gradients that ``node`` computes (those of its results that are in
    ``gradients``) over microbatches. After the first microbatch, each gradient and the sum so far are read, and the sum
    is written. A matrix product accumulates by itself: it reads the sum, and writes the sum instead of its result,
    which its computation hides if it takes longer. So does a cast to fp32
    (:mod:`autopar.passes.lower.accumulate_gradients`): it reads the sum in addition."""
    if repeats.microbatches == 1 or not any(Value(node.name, i) in gradients for i in range(len(node.types))):
        return 0.0
    places = enumerate(zip(node.types, strategy.outputs, strict=True))
    raw = sum(local_bytes(t, p, prices.mesh) for i, (t, p) in places if t and Value(node.name, i) in gradients)
    if node.op == "aten.mm.default":
        each = prices.of_call(
            "accumulating", node, inputs, strategy, lambda: _accumulating_seconds(prices, node, inputs, strategy, raw)
        )
        return each * (repeats.microbatches - 1)
    passes = 1.0 if node.op == CAST and node.type.dtype.itemsize >= MASTER_BYTES else 3.0
    return passes * raw * (repeats.microbatches - 1) / prices.cluster.device.memory_bandwidth


def _accumulating_seconds(
    prices: Prices, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy, raw: int
) -> float:
    operands = tuple(local_type(t, p, prices.mesh) for t, p in zip(inputs, strategy.inputs, strict=True))
    results = tuple(t and local_type(t, p, prices.mesh) for t, p in zip(node.types, strategy.outputs, strict=True))
    return accumulating_seconds(prices.cluster, node, operands, results, raw, strategy.local)


def accumulator_bytes(prices: Prices, kind: TensorType, raw: Placements, repeats: Repeats) -> int:
    """Bytes of the accumulator for a gradient that is computed as a partial sum, in addition to the reduced gradient.
    Other gradients are accumulated where they rest."""
    return partial_bytes(prices, kind, raw) if repeats.accumulates else 0


def partial_bytes(prices: Prices, kind: TensorType, raw: Placements) -> int:
    """Bytes of a gradient that is computed as a partial sum; 0 of any other."""
    return local_bytes(kind, raw, prices.mesh) if any(isinstance(place, Partial) for place in raw) else 0
