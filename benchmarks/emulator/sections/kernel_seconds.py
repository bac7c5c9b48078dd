"""Seconds of each operation of a placed graph on one device: those of a plan.

An operation takes what it takes in a plan of a compiled step, as a part of its kernel
(:meth:`autopar.placement.prices.Prices.node`). What no plan has is added here: products of rows that are not aligned,
and causal attention in equal parts on all context ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.cost import family_of
from autopar.cost.compute.roofline import accumulating_seconds
from autopar.cost.kernels.kernel import Kernels, is_alias
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, TensorType, Value
from autopar.ir.placements import Strategy
from autopar.layout import Layout
from autopar.placement.prices import Prices, local_bytes, local_type
from autopar.planner.roles.expert_blocks import OPERATIONS

from .placement import Placed

PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default"))
# Rows that do not begin at multiples of ALIGNMENT bytes are loaded in pieces (NVIDIA, *Matrix multiplication background
# user's guide*), which slows products of 16 bits down by the factors MISALIGNED: plain ones by what padding GPT-2's
# vocabulary gains on A100 (docs/published.md); batched ones, attention written out above all, as fitted on trial runs
# of BLOOM with heads of 108 and 150. Plans ignore this: there a smaller shard never costs more.
ALIGNMENT = 16
MISALIGNED = {
    **dict.fromkeys(("aten.mm.default", "aten.addmm.default", "aten.linear.default"), 3.0),
    **dict.fromkeys(("aten.bmm.default", "aten.baddbmm.default"), 6.0),
}
_Types = tuple[tuple[TensorType, ...], tuple[TensorType | None, ...]]


def _contiguous(graph: Graph, value: Value) -> int | None:
    """The dim along which a value is contiguous in memory: the last with more than one element; for a view, the
    corresponding dim of what it is a view of. None for a single element."""
    node, shape = graph[value.node], graph.type_of(value).shape
    last = max((dim for dim, size in enumerate(shape) if size != 1), default=None)
    if not is_alias(node):
        return last
    source = node.operands[0]
    before, dim = graph.type_of(source).shape, _contiguous(graph, source)
    if dim is None or node.op == SAVED_ACTIVATION:
        return dim
    if node.op == "aten.permute.default":
        return [int(d) % len(shape) for d in node.args[1]].index(dim)
    if node.op == "aten.expand.default":
        return dim + len(shape) - len(before)
    # A reshape either leaves this dim and those after it unchanged, or moves it to the end, or copies.
    return next((d for d in range(len(shape)) if shape[d:] == before[dim:]), last)


def _is_aligned(graph: Graph, node: Node, local: _Types) -> bool:
    """Whether the rows in memory of a product's operands and result begin at multiples of :data:`ALIGNMENT` bytes."""
    if family_of(node.op).matrix is None:
        return True
    for value, kind in zip((*node.operands, Value(node.name)), (*local[0], local[1][0]), strict=True):
        dim = _contiguous(graph, value)
        if kind is not None and dim is not None and kind.shape[dim] * kind.dtype.itemsize % ALIGNMENT:
            return False
    return True


def local_size(placed: Placed, value: Value) -> int:
    """Bytes of a value on one device; of a saved activation, as it is saved."""
    saved = next((u for u, _ in placed.graph.users.get(value, ()) if u.op == SAVED_ACTIVATION), None)
    place = placed.assignment.placements_of(Value(saved.name) if saved is not None else value)
    return local_bytes(placed.graph.type_of(value), place, placed.prices.mesh)


class KernelPrices:
    """Prices operations under a layout. ``section_of_node``: the section of each node; ``kernels``: those by which the
    layout keeps values for backward."""

    def __init__(self, placed: Placed, section_of_node: Mapping[str, str], layout: Layout, kernels: Kernels) -> None:
        self.placed, self.section_of_node, self.layout, self.kernels = placed, section_of_node, layout, kernels
        self.graph, self.prices, self.assignment = placed.graph, placed.prices, placed.assignment
        self._strategies: dict[str, Strategy] = {}

    def local(self, value: Value) -> int:
        """Bytes of a value on one device."""
        return local_size(self.placed, value)

    def kept(self, value: Value) -> int:
        """Bytes of a value saved for backward."""
        return self.local(value)

    def seconds(self, node: Node) -> float:
        """Seconds of an operation, as a part of its kernel; 0 for blocks of experts, which are priced separately."""
        if node.is_placeholder or node.op == SAVED_ACTIVATION or node.op in OPERATIONS:
            return 0.0
        return self.running(node)

    def running(self, node: Node) -> float:
        """Seconds of an operation that runs and is no block of experts."""
        return self.planned(self.prices, node) * self.misalignment_factor(node)

    def planned(self, prices: Prices, node: Node) -> float:
        """Seconds of an operation in a plan."""
        return prices.node(node, tuple(map(self.graph.type_of, node.operands)), self.strategy(node))

    def accumulating_seconds(self, node: Node, nbytes: float) -> float:
        """Seconds by which a product takes longer if it adds its result to a sum, and so moves ``nbytes`` more."""
        return accumulating_seconds(
            self.prices.cluster, node, *self.local_types(node), nbytes, self.assignment.strategies[node.name].local
        )

    def strategy(self, node: Node) -> Strategy:
        """The strategy to price an operation under: for causal attention of context ranks without its local operation,
        since each rank is taken to have one piece from the sequence's beginning and one from its end."""
        if node.name not in self._strategies:
            chosen = self.assignment.strategies[node.name]
            is_causal = "causal_attention" in chosen.local
            self._strategies[node.name] = replace(chosen, local="") if is_causal else chosen
        return self._strategies[node.name]

    def local_types(self, node: Node) -> _Types:
        """The local types of an operation's operands and results."""
        strategy, mesh = self.assignment.strategies[node.name], self.prices.mesh
        operands = zip(map(self.graph.type_of, node.operands), strategy.inputs, strict=True)
        results = zip(node.types, strategy.outputs, strict=True)
        return (
            tuple(local_type(kind, place, mesh) for kind, place in operands),
            tuple(kind and local_type(kind, place, mesh) for kind, place in results),
        )

    def misalignment_factor(self, node: Node) -> float:
        """By what factor misaligned rows slow a product down. This holds on matrix units of GPUs, which products of 32
        bits and more do not use; CPUs and TPUs load their operands differently."""
        if node.op not in MISALIGNED or not self.prices.cluster.device.is_gpu:
            return 1.0
        local = self.local_types(node)
        is_wide = any(kind.dtype.itemsize > 2 for kind in local[0])
        return 1.0 if is_wide or _is_aligned(self.graph, node, local) else MISALIGNED[node.op]
