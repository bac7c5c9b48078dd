"""Seconds of each kernel of a placed graph on one device: rooflines of local shapes, casts, and the host's starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from autopar.cost import compute_seconds, family_of, node_seconds
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, TensorType, Value
from autopar.layout import Layout, matches
from autopar.placement.axis_names import weight_values
from autopar.placement.prices import local_bytes, local_type

from .experts import FP8, OPERATIONS, are_cast, routers
from .fusion import Kernel, Kernels, is_alias, origin, readers
from .placement import Placed
from .section_of_node import AFTER, BEFORE

PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default"))
# Rows that do not begin at multiples of so many bytes are loaded in pieces (NVIDIA, *Matrix multiplication background
# user's guide*), and a product of 16 bits is so many times slower: a plain one by what padding GPT-2's vocabulary gains
# on A100 (docs/published.md), one of a batch, attention written out above all, as fitted on trial runs of BLOOM, with
# heads of 108 and 150. Plans leave this out: to them a smaller shard is never dearer.
ALIGNMENT = 16
MISALIGNED = {
    **dict.fromkeys(("aten.mm.default", "aten.addmm.default", "aten.linear.default"), 3.0),
    **dict.fromkeys(("aten.bmm.default", "aten.baddbmm.default"), 6.0),
}
_Types = tuple[tuple[TensorType, ...], tuple[TensorType | None, ...]]


def graphed(module: str, layout: Layout) -> bool:
    """Whether the host starts the operations of a module as one."""
    return matches(module, layout.cuda_graphs)


def _contiguous(graph: Graph, value: Value) -> int | None:
    """The dim along which a value lies in memory: the last of more than one element, of a view that of what it is a
    view of. None of a single element."""
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
    # A reshape that does not leave this dim and those after it as they are moves it to the end, or copies.
    return next((d for d in range(len(shape)) if shape[d:] == before[dim:]), last)


def _is_aligned(graph: Graph, node: Node, local: _Types) -> bool:
    """Whether the rows of all that a product takes and makes, as they lie in memory, begin at multiples of
    :data:`ALIGNMENT` bytes."""
    if family_of(node.op).matrix is None:
        return True
    for value, kind in zip((*node.operands, Value(node.name)), (*local[0], local[1][0]), strict=True):
        dim = _contiguous(graph, value)
        if kind is not None and dim is not None and kind.shape[dim] * kind.dtype.itemsize % ALIGNMENT:
            return False
    return True


def local_size(placed: Placed, value: Value) -> int:
    """Bytes of a value on one device; of one that rests, as it rests."""
    rest = next((u for u, _ in placed.graph.users.get(value, ()) if u.op == SAVED_ACTIVATION), None)
    place = placed.assignment.placements_of(Value(rest.name) if rest is not None else value)
    return local_bytes(placed.graph.type_of(value), place, placed.prices.mesh)


class KernelPrices:
    """What kernels take under a layout; ``section_of_node``: the section of each node."""

    def __init__(self, placed: Placed, section_of_node: Mapping[str, str], layout: Layout, kernels: Kernels) -> None:
        self.placed, self.section_of_node, self.layout, self.kernels = placed, section_of_node, layout, kernels
        self.graph, self.prices, self.assignment = placed.graph, placed.prices, placed.assignment
        chosen_by = routers(self.graph)
        self.routing = {node.module for node in self.graph.nodes if any(v.node in chosen_by for v in node.operands)}
        self.weights = weight_values(self.graph)
        self.fp8 = frozenset(node.name for node in self.graph.nodes if self._is_fp8(node))
        # What values are made again from.
        self.sources = frozenset(source for found in kernels.rematerialised.values() for source in found)
        # Which product each value is first cast for.
        self.cast: dict[Value, str] = {}
        for kernel in kernels.kernels:
            if kernel.heavy is not None and self.is_fp8(kernel.heavy):
                for value in kernel.heavy.operands:
                    self.cast.setdefault(origin(self.graph, value), kernel.heavy.name)

    @cached_property
    def cast_weights(self) -> frozenset[str]:
        """Parameters that products take in fp8, by node name."""
        taken = {origin(self.graph, value).node for name in self.fp8 for value in self.graph[name].operands}
        return frozenset(name for name in taken if self.graph[name].op == "param")

    def is_attention(self, kernel: Kernel) -> bool:
        return kernel.heavy is not None and family_of(kernel.heavy.op).is_attention

    def is_product(self, kernel: Kernel) -> bool:
        """Whether it is a product with weights."""
        return kernel.heavy is not None and kernel.heavy.op in PRODUCTS

    def local(self, value: Value) -> int:
        return local_size(self.placed, value)

    def kept(self, value: Value) -> int:
        """Bytes of a value that is kept for backward: of what only products in fp8 take there, its cast in columns."""
        users = [user for user in readers(self.graph, value) if user.phase == "backward"]
        if users and value not in self.sources and all(map(self.is_fp8, users)):
            return self.local(value) // self.graph.type_of(value).dtype.itemsize * FP8.itemsize
        return self.local(value)

    def seconds(self, kernel: Kernel) -> float:
        heavy = kernel.heavy
        if heavy is not None and heavy.op in OPERATIONS:
            return 0.0
        if heavy is not None:
            inputs, outputs = self._held(heavy)
            inputs = tuple(TensorType(kind.shape, FP8) for kind in inputs) if self.is_fp8(heavy) else inputs
            local = self._runs_as(self.assignment.strategies[heavy.name].local)
            seconds = node_seconds(self.prices.cluster, heavy, inputs, outputs, local)
            cast = self.casts(heavy)
            cast_seconds = compute_seconds(self.prices.cluster, 0.0, cast, torch.float32) if cast else 0.0
            return cast_seconds + seconds * self._slower(heavy, (inputs, outputs))
        if all(is_alias(node) or family_of(node.op).is_view for node in kernel.nodes):
            return 0.0
        moved = sum(map(self.local, (*kernel.reads, *kernel.writes)))
        return compute_seconds(self.prices.cluster, 0.0, moved, torch.float32)

    def _runs_as(self, local: str) -> str:
        """The local operation that replaces one: none for causal attention where ranks hold pieces of the sequence
        so that each attends to as much."""
        return "" if self.layout.context_load_balancing and "causal_attention" in local else local

    def host_seconds(self, kernel: Kernel) -> float:
        """Seconds of the host in which it starts a kernel."""
        if not self.seconds(kernel) or graphed(kernel.nodes[0].module, self.layout):
            return 0.0
        return self.prices.cluster.device.host_seconds

    def _held(self, node: Node) -> _Types:
        """What an operation takes and gives on one device."""
        strategy, mesh = self.assignment.strategies[node.name], self.prices.mesh
        taken = zip(map(self.graph.type_of, node.operands), strategy.inputs, strict=True)
        made = zip(node.types, strategy.outputs, strict=True)
        return (
            tuple(local_type(kind, place, mesh) for kind, place in taken),
            tuple(kind and local_type(kind, place, mesh) for kind, place in made),
        )

    def _slower(self, node: Node, local: _Types) -> float:
        """How many times slower a product is for its rows: on matrix units, which CPUs and TPUs feed otherwise, and
        which products of 32 bits and more do not use."""
        has_units = bool(self.prices.cluster.device.processors)
        if not has_units or any(kind.dtype.itemsize > 2 for kind in local[0]) or _is_aligned(self.graph, node, local):
            return 1.0
        return MISALIGNED.get(node.op, 1.0)

    def is_fp8(self, node: Node) -> bool:
        return node.name in self.fp8

    def _is_fp8(self, node: Node) -> bool:
        """Whether the layout has it computed in fp8: products with weights, or for their gradients, in layers. What is
        in none, the head above all, and routers stay as they are, and so does what libraries do not multiply in fp8:
        dims of weights that are no multiples of 16, and for their gradients tokens that are none, which these sum over
        (``torch._scaled_mm``; of other products tokens are the rows of its first operand, which may be any)."""
        if self.layout.precision != "fp8" or self.section_of_node[node.name] in (BEFORE, AFTER):
            return False
        if node.op not in PRODUCTS or node.module in self.routing:
            return False
        matrix = family_of(node.op).matrix
        if matrix is None:
            return False
        m, n, k = matrix(*self._held(node))
        dims = (n, k) if node.operands[-1].node in self.weights else (m, n, k)
        return are_cast(*dims)

    def casts(self, node: Node) -> float:
        """Bytes read and written to have in fp8 what a product takes, in rows and in columns: of every value once, and
        of none that an elementwise kernel made, which writes it so. Weights are cast once for all microbatches."""
        if not self.is_fp8(node):
            return 0.0
        taken = [origin(self.graph, value) for value in node.operands]
        first = [v for v in taken if self.cast[v] == node.name]
        return sum(2.0 * self.local(v) for v in first if v.node in self.kernels.of and self.kernels.of[v.node].heavy)
