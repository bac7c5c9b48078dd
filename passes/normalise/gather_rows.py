"""Writes an index with a position for each sample, ``x[arange(b), i]``, as the gather that it is.

In general an index takes any row for any sample, so that every device, and every microbatch, needs the rows of all.
Where one of two index tensors counts the positions of its dim, position ``j`` of the result reads position ``j`` of
that dim. A gather says so, and can be sharded there. Its gradient and assignments are ``scatter_add`` and ``scatter``::

    %r: i64[b] = aten.arange.default(b)                       # %x: f32[b, 9, 4], %i: i64[b]
    %y: f32[b, 4] = aten.index.Tensor(%x, [%r, %i])

becomes, with ``%w`` for ``%i`` where negative positions are counted from the end::

    %rows: i64[b, 1, 1] = aten.reshape.default(%w, [b, 1, 1])
    %wide: i64[b, 1, 4] = aten.expand.default(%rows, [b, 1, 4])
    %read: f32[b, 1, 4] = aten.gather.default(%x, 1, %wide)
    %y: f32[b, 4] = aten.reshape.default(%read, [b, 4])
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from autopar.ir.graph import Graph
from autopar.ir.node import CAST, Arg, Dim, Node, TensorType, Value
from autopar.passes.base import Pass

from .counting import INTEGERS, counted_dim

_READS = frozenset(("aten.index.Tensor", "aten._unsafe_index.Tensor"))
_WRITES = frozenset(("aten.index_put.default", "aten._unsafe_index_put.default"))
_RESHAPE, _PERMUTE, _EXPAND = "aten.reshape.default", "aten.permute.default", "aten.expand.default"
Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class GatherRows(Pass):
    """Replaces an index by two tensors, of which one counts the positions of its dim, by a gather along the other dim;
    so with writes. An index by two counts, of which each has a dim of the result, only moves dims and stays."""

    name: ClassVar[str] = "gather-rows"

    def apply(self, graph: Graph) -> Graph:
        return gather_rows(graph)


def gather_rows(graph: Graph) -> Graph:
    """See :class:`GatherRows`."""
    writer = _Writer(graph)
    for node in graph.nodes:
        pair = _pair(graph, node) if node.op in _READS | _WRITES else None
        if pair is None:
            writer.nodes.append(node)
        else:
            writer.write(node, pair)
    return replace(graph, nodes=tuple(writer.nodes)) if len(writer.nodes) > len(graph.nodes) else graph


@dataclass(frozen=True)
class _Pair:
    """An index of ``shape`` whose dim ``own`` is indexed by its positions and dim ``along`` by ``index``. The dims
    ``block`` of both index tensors, of which ``counted`` has the positions, begin at ``start`` in the result."""

    shape: Shape
    own: int
    along: int
    index: Value
    block: Shape
    counted: int

    @property
    def start(self) -> int:
        """Indexed dims that are not adjacent come first in the result."""
        return min(self.own, self.along) if abs(self.own - self.along) == 1 else 0

    @property
    def others(self) -> tuple[int, ...]:
        """The dims of the block that are not counted."""
        return tuple(dim for dim in range(len(self.block)) if dim != self.counted)

    @property
    def gathered(self) -> Shape:
        """The shape of the gather: all other dims of the block along one dim."""
        sizes = list(self.shape)
        sizes[self.along] = math.prod(self.block[dim] for dim in self.others)
        return tuple(sizes)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the gather with the indexed ones together, where they are in the result."""
        kept = [dim for dim in range(len(self.shape)) if dim not in (self.own, self.along)]
        return (*kept[: self.start], self.own, self.along, *kept[self.start :])

    @property
    def unfolded(self) -> Shape:
        """The gather in that order, with all dims of the block."""
        sizes = [self.shape[dim] for dim in self.order]
        others = [self.block[dim] for dim in self.others]
        return (*sizes[: self.start + 1], *others, *sizes[self.start + 2 :])

    @property
    def block_order(self) -> tuple[int, ...]:
        """The dims of ``unfolded`` in the order of the result."""
        dims = [self.counted, *self.others]
        block = [self.start + dims.index(dim) for dim in range(len(dims))]
        after = range(self.start + len(dims), len(self.unfolded))
        return (*range(self.start), *block, *after)

    @property
    def result(self) -> Shape:
        return tuple(self.unfolded[dim] for dim in self.block_order)


def _pair(graph: Graph, node: Node) -> _Pair | None:
    """How ``node`` is a gather; None if it is not."""
    indexed = [(dim, index) for dim, index in enumerate(node.args[1]) if isinstance(index, Value)]
    if len(indexed) != 2 or any(graph.type_of(index).dtype not in INTEGERS for _, index in indexed):
        return None
    x, shapes = graph.type_of(node.args[0]), [graph.type_of(index).shape for _, index in indexed]
    block = _broadcast(*shapes)
    if block is None:
        return None
    found = []
    for (own, count), (along, index) in (indexed, indexed[::-1]):
        dim = counted_dim(graph, count)
        if dim is not None and graph.type_of(count).shape[dim] == x.shape[own]:
            counted = dim + len(block) - graph.type_of(count).rank
            found.append(_Pair(x.shape, own, along, index, block, counted))
    moves_dims = len(found) == 2 and found[0].counted != found[1].counted
    sums_bools = node.op in _WRITES and x.dtype == torch.bool and _accumulates(node)
    return None if not found or moves_dims or sums_bools else found[0]


def _broadcast(first: Shape, second: Shape) -> Shape | None:
    """The shape of both together; None if symbolic sizes leave it open."""
    rank = max(len(first), len(second))
    pairs = zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True)
    sizes = [b if a == 1 else a if b in (1, a) else None for a, b in pairs]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _accumulates(node: Node) -> bool:
    return bool(node.args[3] if len(node.args) > 3 else dict(node.kwargs).get("accumulate", False))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


class _Writer:
    """Writes the nodes that replace an index."""

    like: Node

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.types: dict[Value, TensorType] = {}
        self.taken = {node.name for node in graph.nodes}

    def write(self, node: Node, pair: _Pair) -> None:
        """Appends the nodes that compute ``node``; the last of them has its name."""
        self.like = node
        wide = self._positions(pair)
        x = node.args[0]
        if node.op in _READS:
            read = self._emit("aten.gather.default", (x, pair.along, wide), pair.gathered, node.type.dtype)
            self._view(self._view(self._view(read, pair.order), pair.unfolded, reshape=True), pair.block_order)
        else:
            op = "aten.scatter_add.default" if _accumulates(node) else "aten.scatter.src"
            self._emit(op, (x, pair.along, wide, self._written(node.args[2], pair)), pair.shape, node.type.dtype)
        self.nodes[-1] = replace(self.nodes[-1], name=node.name)

    def _positions(self, pair: _Pair) -> Value:
        """The positions along the gathered dim, in the shape of the gather."""
        value = self._counted_from_start(pair.index, pair.shape[pair.along])
        block = (1,) * (len(pair.block) - self._type(value).rank) + self._type(value).shape
        value = self._expand(self._view(value, block, reshape=True), pair.block)
        value = self._view(value, (pair.counted, *pair.others))
        rows, columns = pair.shape[pair.own], pair.gathered[pair.along]
        value = self._view(value, (rows, columns), reshape=True)
        value = self._view(value, (0, 1) if pair.own < pair.along else (1, 0))
        thin = tuple(size if dim in (pair.own, pair.along) else 1 for dim, size in enumerate(pair.gathered))
        return self._expand(self._view(value, thin, reshape=True), pair.gathered)

    def _counted_from_start(self, index: Value, size: Dim) -> Value:
        """``index``, in which a negative position counts from the end of ``size``, without negative ones."""
        shape, dtype = self._type(index).shape, torch.int64
        if self._type(index).dtype != dtype:
            index = self._emit(CAST, (index,), shape, dtype, (("dtype", dtype),))
        below = self._emit("aten.lt.Scalar", (index, 0), shape, torch.bool)
        moved = self._emit("aten.add.Tensor", (index, size), shape, dtype)
        return self._emit("aten.where.self", (below, moved, index), shape, dtype)

    def _written(self, values: Value, pair: _Pair) -> Value:
        """What is written, in the shape of the gather."""
        shape = (1,) * (len(pair.result) - self._type(values).rank) + self._type(values).shape
        values = self._expand(self._view(values, shape, reshape=True), pair.result)
        values = self._view(values, _inverse(pair.block_order))
        folded = tuple(pair.gathered[dim] for dim in pair.order)
        return self._view(self._view(values, folded, reshape=True), _inverse(pair.order))

    def _view(self, value: Value, to: Shape, *, reshape: bool = False) -> Value:
        """``value`` in another shape, or with its dims in another order."""
        shape = self._type(value).shape
        if to == (shape if reshape else tuple(range(len(shape)))):
            return value
        if not reshape:
            return self._emit(_PERMUTE, (value, to), tuple(shape[int(dim)] for dim in to))
        last = self.nodes[-1]
        if last.op == _RESHAPE and last.name == value.node and value in self.types:
            value = self.nodes.pop().operands[0]  # One reshape for two.
        return self._emit(_RESHAPE, (value, to), to)

    def _expand(self, value: Value, shape: Shape) -> Value:
        return value if self._type(value).shape == shape else self._emit(_EXPAND, (value, shape), shape)

    def _emit(
        self,
        op: str,
        args: tuple[Arg, ...],
        shape: Shape,
        dtype: torch.dtype | None = None,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Value:
        kind = TensorType(shape, dtype or self._type(args[0]).dtype)
        name = self._fresh()
        self.nodes.append(replace(self.like, name=name, op=op, args=args, kwargs=kwargs, types=(kind,)))
        self.types[Value(name)] = kind
        return Value(name)

    def _fresh(self) -> str:
        count = 1
        while (name := f"{self.like.name}_rows_{count}") in self.taken:
            count += 1
        self.taken.add(name)
        return name

    def _type(self, value: Value) -> TensorType:
        return self.types[value] if value in self.types else self.graph.type_of(value)
