"""Seconds of each operation of a placed graph on one device: those of a plan, casts, and the host's launches.

An operation takes what it takes in a plan of a compiled step, as a part of its kernel
(:meth:`autopar.placement.prices.Prices.node`). What no plan has is added here: modules that run operation by operation,
products in fp8 and of rows that are not aligned, and causal attention in equal parts on all context ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch

from autopar.cost import compute_seconds, family_of, node_seconds
from autopar.cost.compute.op_families import DRAW
from autopar.cost.compute.roofline import accumulating_seconds
from autopar.cost.kernels.kernel import Kernels, is_alias, origin, readers
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, TensorType, Value
from autopar.ir.placements import Strategy
from autopar.layout import Layout, matches
from autopar.placement.axis_names import weight_values
from autopar.placement.prices import Prices, local_bytes, local_type

from .experts import FP8, OPERATIONS, are_cast, routers
from .placement import Placed
from .section_of_node import AFTER, BEFORE

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


def launches_as_graph(module: str, layout: Layout) -> bool:
    """Whether the host launches the operations of a module as one CUDA graph."""
    return matches(module, layout.cuda_graphs)


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
        chosen_by = routers(self.graph)
        self.routing = {node.module for node in self.graph.nodes if any(v.node in chosen_by for v in node.operands)}
        self.weights = weight_values(self.graph)
        self.fp8 = frozenset(node.name for node in self.graph.nodes if self._is_fp8(node))
        self._strategies: dict[str, Strategy] = {}
        # The sources of recomputed values.
        self.sources = frozenset(source for sources in kernels.rematerialised.values() for source in sources)
        # The first product that each value is cast for.
        self.cast: dict[Value, str] = {}
        for kernel in kernels.kernels:
            if kernel.heavy is not None and self.is_fp8(kernel.heavy):
                for value in kernel.heavy.operands:
                    self.cast.setdefault(origin(self.graph, value), kernel.heavy.name)

    @cached_property
    def cast_weights(self) -> frozenset[str]:
        """Parameters that products read in fp8, by node name."""
        operands = {origin(self.graph, value).node for name in self.fp8 for value in self.graph[name].operands}
        return frozenset(name for name in operands if self.graph[name].op == "param")

    def is_attention(self, node: Node) -> bool:
        return family_of(node.op).is_attention

    def is_product(self, node: Node) -> bool:
        """Whether the operation is a product with weights."""
        return node.op in PRODUCTS

    def local(self, value: Value) -> int:
        return local_size(self.placed, value)

    def kept(self, value: Value) -> int:
        """Bytes of a value saved for backward. If only fp8 products read it there, its cast by columns is saved."""
        users = [user for user in readers(self.graph, value) if user.phase == "backward"]
        if users and value not in self.sources and all(map(self.is_fp8, users)):
            return self.local(value) // self.graph.type_of(value).dtype.itemsize * FP8.itemsize
        return self.local(value)

    def seconds(self, node: Node) -> float:
        """Seconds of an operation, as a part of its kernel; 0 for blocks of experts, which are priced separately."""
        if node.is_placeholder or node.op == SAVED_ACTIVATION or node.op in OPERATIONS:
            return 0.0
        if self.is_fp8(node):
            return self._casting_seconds(node) + self._fp8_seconds(node) * self._misalignment_factor(node)
        if not self._is_eager(node):
            return self._planned(self.prices, node) * self._misalignment_factor(node)
        # Other libraries draw in the kernel that writes the numbers, unlike the runtime.
        if family_of(node.op) is DRAW:
            drawn = sum(self.local(Value(node.name, index)) for index in range(len(node.types)))
            return compute_seconds(self.prices.cluster, 0.0, drawn, torch.float32)
        return 0.0 if is_alias(node) or family_of(node.op).is_view else self._planned(self.prices.uncompiled, node)

    def _planned(self, prices: Prices, node: Node) -> float:
        """Seconds of an operation in a plan."""
        return prices.node(node, tuple(map(self.graph.type_of, node.operands)), self._strategy(node))

    def accumulating_seconds(self, node: Node, nbytes: float) -> float:
        """Seconds by which a product takes longer if it adds its result to a sum, and so moves ``nbytes`` more."""
        return accumulating_seconds(
            self.prices.cluster, node, *self._local_types(node), nbytes, self.assignment.strategies[node.name].local
        )

    def _fp8_seconds(self, node: Node) -> float:
        inputs, outputs = self._local_types(node)
        inputs = tuple(TensorType(kind.shape, FP8) for kind in inputs)
        return node_seconds(self.prices.cluster, node, inputs, outputs, self._strategy(node).local)

    def _casting_seconds(self, node: Node) -> float:
        cast = self.casts(node)
        return compute_seconds(self.prices.cluster, 0.0, cast, torch.float32) if cast else 0.0

    def _strategy(self, node: Node) -> Strategy:
        """The strategy to price an operation under: for causal attention of context ranks that are load balanced
        without its local operation, since then each attends to as much."""
        if node.name not in self._strategies:
            chosen = self.assignment.strategies[node.name]
            if self.layout.context_load_balancing and "causal_attention" in chosen.local:
                chosen = replace(chosen, local="")
            self._strategies[node.name] = chosen
        return self._strategies[node.name]

    def _is_eager(self, node: Node) -> bool:
        return matches(node.module, self.layout.eager)

    def host_seconds(self, node: Node) -> float:
        """Seconds that the host takes for an operation's part of the launch of its kernel."""
        if node.op in OPERATIONS or launches_as_graph(node.module, self.layout):
            return 0.0
        return self._launches(node) * self.prices.cluster.device.host_seconds

    def _launches(self, node: Node) -> float:
        """The kernels that an operation launches, or its share of one."""
        fused = self.prices.fused
        share = None if self._is_eager(node) or fused is None else fused.share_of(node)
        if share is not None:
            return share.launches
        return float(not (node.is_placeholder or is_alias(node) or family_of(node.op).is_view))

    def _local_types(self, node: Node) -> _Types:
        """The local types of an operation's operands and results."""
        strategy, mesh = self.assignment.strategies[node.name], self.prices.mesh
        operands = zip(map(self.graph.type_of, node.operands), strategy.inputs, strict=True)
        results = zip(node.types, strategy.outputs, strict=True)
        return (
            tuple(local_type(kind, place, mesh) for kind, place in operands),
            tuple(kind and local_type(kind, place, mesh) for kind, place in results),
        )

    def _misalignment_factor(self, node: Node) -> float:
        """By what factor misaligned rows slow a product down. This holds on matrix units of GPUs, which products of 32
        bits and more do not use; CPUs and TPUs load their operands differently."""
        if node.op not in MISALIGNED or not self.prices.cluster.device.is_gpu:
            return 1.0
        local = self._local_types(node)
        is_wide = any(kind.dtype.itemsize > 2 for kind in local[0])
        return 1.0 if is_wide or _is_aligned(self.graph, node, local) else MISALIGNED[node.op]

    def is_fp8(self, node: Node) -> bool:
        return node.name in self.fp8

    def _is_fp8(self, node: Node) -> bool:
        """Whether the layout computes a node in fp8: products with weights, or for their gradients, in layers. Products
        outside of layers (such as the head) and routers keep their dtype. So do products that libraries do not multiply
        in fp8: dims of weights, and for their gradients the number of tokens that they sum over, must be multiples of
        16 (``torch._scaled_mm``; in other products tokens are the rows of the first operand, of which there may be any
        number)."""
        if self.layout.precision != "fp8" or self.section_of_node[node.name] in (BEFORE, AFTER):
            return False
        if node.op not in PRODUCTS or node.module in self.routing:
            return False
        matrix = family_of(node.op).matrix
        if matrix is None:
            return False
        m, n, k = matrix(*self._local_types(node))
        dims = (n, k) if node.operands[-1].node in self.weights else (m, n, k)
        return are_cast(*dims)

    def casts(self, node: Node) -> float:
        """Bytes read and written to cast a product's operands to fp8, by rows and by columns. Each value is cast once,
        and values of elementwise kernels not at all, since these write fp8 themselves. Weights are cast once for all
        microbatches."""
        if not self.is_fp8(node):
            return 0.0
        operands = [origin(self.graph, value) for value in node.operands]
        cast_here = [v for v in operands if self.cast[v] == node.name]
        return sum(
            2.0 * self.local(v) for v in cast_here if v.node in self.kernels.of and self.kernels.of[v.node].heavy
        )
