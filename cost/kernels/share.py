"""The share of a kernel that one of its operations accounts for: the price of a kernel is the sum of its shares.

    seconds of an operation = launches · launch + max(work, traffic) + memory_stalls · min(work, traffic)

as of the roofline (:mod:`autopar.cost.compute.roofline`), with the bytes only of those operands that it is the first in
its kernel to read from memory, and of those results that others read from there. Its work are transcendental functions;
other arithmetic takes less than the traffic of the kernel and is hidden by it, except that of random draws, which pay
for what the traffic of their kernel does not hide. The operations of a kernel pay for one launch in equal parts. So the
price of each depends on its own placements alone, which is what the placement program needs, and the sum over a kernel
has each byte once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from autopar.cluster.description import Cluster
from autopar.cost.compute.flops_and_bytes import Inputs, Operation, Outputs
from autopar.cost.compute.op_families import DRAW, SELECT, family_of
from autopar.cost.compute.roofline import compute_seconds, dtype_of
from autopar.ir.graph import Graph
from autopar.ir.node import Node, TensorType, Value

from .kernel import Kernel, is_alias, origin


@dataclass(frozen=True)
class Share:
    """An operation's share of its kernel. ``reads``, ``writes``: of each operand and each result the bytes in memory
    that it reads or writes, as a multiple of the bytes of the value (an expanded operand has fewer, one in whose place
    sources are read has others). ``launches``: its part of the launch. ``beside``: of a draw, the bytes that its kernel
    moves for each element that is drawn in it."""

    launches: float
    reads: tuple[float, ...]
    writes: tuple[float, ...]
    beside: float = 0.0


FREE = Share(0.0, (), ())
"""Of a view."""
# Arithmetic of one element of a draw (autopar/ops/random.py), in FLOPs of 32 bits: 13 additions, shifts and bitwise
# operations of 64 bits, each two of 32 bits, and three 64-bit products of four; two FLOPs each, since a processor of a
# GPU has as many units for 32-bit integers as for multiply-adds (NVIDIA's A100 whitepaper; H100s have half as many). A
# core draws an element and multiplies by it in 0.65 ns, which is 76 FLOPs at 117 GFLOP/s (tests/runtime/
# test_piece_draws.py's section of 3 million elements, AVX-512).
DRAWN_FLOPS = 76.0


def share_seconds(
    cluster: Cluster, node: Operation, inputs: Inputs, outputs: Outputs, share: Share, local: str = ""
) -> float:
    """Seconds of ``node`` as a part of its kernel, on a device that holds operands of (local) types ``inputs`` and
    results ``outputs``. ``local``: the name of the local operation that replaces it, if any."""
    family = family_of(local or node.op)
    moved = share_bytes(node, inputs, outputs, share, local)
    functions = float(family.flops(node, inputs, outputs)) if family.is_function else 0.0
    dtype = dtype_of(inputs, outputs)
    seconds = compute_seconds(cluster, 0.0, moved, dtype, functions=functions, launches=share.launches)
    if family is DRAW and share.launches:
        seconds += _drawing_seconds(cluster, float(family.flops(node, inputs, outputs)), share)
    return seconds


def _drawing_seconds(cluster: Cluster, elements: float, share: Share) -> float:
    """What drawing adds to the traffic of its kernel, as of the roofline."""
    device = cluster.device
    arithmetic = elements * DRAWN_FLOPS / device.flops(torch.float32)
    traffic = elements * share.beside / device.memory_bandwidth
    return max(0.0, arithmetic - traffic) + device.memory_stalls * min(arithmetic, traffic)


def share_bytes(node: Operation, inputs: Inputs, outputs: Outputs, share: Share, local: str = "") -> float:
    """Bytes that ``node`` reads and writes as a part of its kernel; the arguments of :func:`share_seconds`."""
    read = sum(part * _read(node, index, inputs, outputs, local) for index, part in enumerate(share.reads) if part)
    written = zip(share.writes, outputs, strict=False)
    return read + sum(part * float(kind.bytes) for part, kind in written if part and kind is not None)


def _read(node: Operation, index: int, inputs: Inputs, outputs: Outputs, local: str) -> float:
    """Bytes that an operation reads of an operand: of a table, the rows that are looked up."""
    if index == 0 and family_of(local or node.op) is SELECT:
        return float(sum(kind.bytes for kind in outputs if kind is not None))
    return float(inputs[index].bytes)


def shares_of(graph: Graph, kernel: Kernel) -> dict[str, Share]:
    """The shares of a kernel's operations, by name."""
    counted, unread = [n for n in kernel.nodes if not _is_view(n)], dict.fromkeys(kernel.reads)
    written, shares = set(kernel.writes), dict[str, Share]()
    launches = 1.0 / len(counted) if counted else 0.0
    for node in kernel.nodes:
        reads = []
        for operand in node.operands:
            value = origin(graph, operand)
            taken = [source for source in kernel.recomputes.get(value, (value,)) if source in unread]
            for source in taken:
                del unread[source]
            nbytes = sum(_bytes(graph.type_of(source)) for source in taken)
            reads.append(nbytes / max(1.0, _bytes(graph.type_of(operand))))
        writes = tuple(float(Value(node.name, index) in written) for index in range(len(node.types)))
        shares[node.name] = Share(launches if not _is_view(node) else 0.0, tuple(reads), writes) if counted else FREE
    drawn = [node for node in kernel.nodes if family_of(node.op) is DRAW]
    if drawn:
        beside = sum(map(partial(_moved, graph, shares), kernel.nodes)) / max(1.0, sum(map(_elements, drawn)))
        shares.update({node.name: replace(shares[node.name], beside=beside) for node in drawn})
    return shares


def _moved(graph: Graph, shares: Mapping[str, Share], node: Node) -> float:
    """Bytes that a node reads and writes as a part of its kernel, unsharded."""
    share = shares[node.name]
    read = sum(part * _bytes(graph.type_of(value)) for part, value in zip(share.reads, node.operands, strict=False))
    return read + sum(part * _bytes(kind) for part, kind in zip(share.writes, node.types, strict=False) if kind)


def _elements(node: Node) -> float:
    return float(node.type.numel)


def _is_view(node: Node) -> bool:
    return is_alias(node) or family_of(node.op).is_view


def _bytes(kind: TensorType) -> float:
    return float(kind.bytes)
