"""Attention under a mask that no input decides: a causal one becomes ``is_causal``, one that hides nothing is dropped.

Models compute masks from positions, and leave them out where they see that attention is causal; while they are traced
they cannot see, and add a mask of zeros and minus infinity. With it attention takes twice the products, and no kernel
that is built for causal attention runs::

    %mask: f32[b, 1, 9, 9] = aten.where.self(%later, %hidden, %zero)
    %y: f32[b, 2, 9, 4], %y.1: f32[b, 2, 9] = autopar.attention.default(%q, %k, %v, %mask, False, scale=0.5)

becomes, where the values of ``%mask`` are those of causal attention::

    %y: f32[b, 2, 9, 4], %y.1: f32[b, 2, 9] = autopar.attention.default(%q, %k, %v, None, True, scale=0.5)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, Value, map_arg
from autopar.passes.base import Pass, is_pure
from autopar.torch_internals.modes import without_dispatch_modes
from autopar.torch_internals.operators import operation_called

from .same_for_all_samples import same_for_all_samples

Known = Literal["causal", "nothing"]
# Where the query is among the arguments of attention; the key follows.
_QUERY = {"autopar.attention.default": 0, "autopar.attention_backward.default": 1}
# Where the mask is; `is_causal` follows.
_MASK = {"autopar.attention.default": 3, "autopar.attention_backward.default": 6}
# Elements up to which a value is computed whole; larger ones are computed in rows. Chosen: some megabytes.
_WHOLE = 1 << 20
# Elements of a mask beyond which it is left as it is, without those of samples and heads that have the same.
# Chosen: 32 thousand positions, which take half a minute.
_MOST = 1 << 30
# Elements, of all together, of values that are computed whole since they cannot be computed in rows. Chosen: half a
# gigabyte of numbers.
_LARGEST = 1 << 26
# Operations besides torch's pointwise ones that give the same rows of their result for rows of their operand.
_IN_ROWS = frozenset(
    f"aten.{name}.default" for name in ("_to_copy", "clone", "full_like", "zeros_like", "ones_like", "empty_like")
)
_FILLED = frozenset(("aten.full.default", "aten.zeros.default", "aten.ones.default"))
_TRIANGLES = frozenset(("aten.triu.default", "aten.tril.default"))


class _Unknown(Exception):
    """What a value is cannot be said without running a step."""


@dataclass(frozen=True)
class KnownMasks(Pass):
    """See the module. A mask counts as known if it is computed from positions and constants alone, and is the same for
    all samples (:mod:`.same_for_all_samples`); what hides a position is minus infinity or the least number of its
    dtype."""

    name: ClassVar[str] = "known-masks"

    def apply(self, graph: Graph) -> Graph:
        return known_masks(graph)


def known_masks(graph: Graph) -> Graph:
    """See :class:`KnownMasks`."""
    users = {node.name: _mask_of(node) for node in graph.nodes if node.op in _MASK}
    kinds = {mask: _kind(graph, mask) for mask in set(users.values()) if mask is not None}
    found = {name: kinds[mask] for name, mask in users.items() if mask is not None}
    wide = {name: kind for name, kind in found.items() if kind == "nothing" or _has_all_scores(graph, graph[name])}
    nodes = tuple(_without(node, wide.get(node.name)) for node in graph.nodes)
    return replace(graph, nodes=nodes) if any(wide.values()) else graph


def _mask_of(node: Node) -> Value | None:
    """The mask of an attention that is not causal besides."""
    place = _MASK[node.op]
    mask = node.args[place] if len(node.args) > place else dict(node.kwargs).get("mask")
    causal = node.args[place + 1] if len(node.args) > place + 1 else dict(node.kwargs).get("is_causal", False)
    return mask if isinstance(mask, Value) and not causal else None


def _has_all_scores(graph: Graph, node: Node) -> bool:
    """Whether the mask has a row for each query and a column for each key, and does not repeat one for all."""
    first = _QUERY[node.op]
    lengths = tuple(graph.type_of(operand).shape[-2] for operand in node.args[first : first + 2])
    mask = _mask_of(node)
    return mask is not None and graph.type_of(mask).shape[-2:] == lengths


def _without(node: Node, kind: Known | None) -> Node:
    if kind is None:
        return node
    kwargs = tuple((key, arg) for key, arg in node.kwargs if key not in ("mask", "is_causal"))
    return replace(node, args=(*node.args[: _MASK[node.op]], None, kind == "causal"), kwargs=kwargs)


def _kind(graph: Graph, mask: Value) -> Known | None:
    """What ``mask`` does for every size of the batch; None if that is neither, or not known."""
    needed = graph.needed_for([mask])
    cone = replace(graph, nodes=tuple(node for node in graph.nodes if node.name in needed), outputs=())
    shape = graph.type_of(mask).shape
    decided = all(node.op == "constant" if node.is_placeholder else is_pure(node.op) for node in cone.nodes)
    if not decided or len(shape) < 2 or not all(isinstance(size, int) for size in shape[-2:]):
        return None
    if len(graph.symbols) > 1 or not same_for_all_samples(cone, mask):
        return None
    with without_dispatch_modes():  # Whoever plans may imagine all tensors.
        return _kind_at(cone.at(**{name: 1 for name, _ in graph.symbols}), mask)


def _kind_at(graph: Graph, mask: Value) -> Known | None:
    kind = graph.type_of(mask)
    if not kind.dtype.is_floating_point or not 0 < int(kind.shape[-2] * kind.shape[-1]) <= _MOST or not kind.numel:
        return None
    kinds, seen = {"causal", "nothing"}, 0
    try:
        for first, rows in _Rows(graph).blocks(mask):
            kinds &= _kinds(rows, first)
            seen += rows.numel()
            if not kinds or seen > _MOST:
                return None
    except (_Unknown, RuntimeError, TypeError, IndexError, ValueError):
        return None
    # Of one position, both.
    return "nothing" if "nothing" in kinds else "causal"


def _kinds(rows: Tensor, first: int) -> set[Known | None]:
    """What the rows of a mask from ``first`` on may be rows of."""
    hides = rows <= torch.finfo(rows.dtype).min
    hidden = int(hides.count_nonzero())
    if int(rows.count_nonzero()) != hidden:
        return set()
    found: set[Known | None] = set() if hidden else {"nothing"}
    return found | {"causal"} if _is_causal(hides, hidden, first) else found


def _is_causal(hides: Tensor, hidden: int, first: int) -> bool:
    """Whether each row of a mask from ``first`` on hides the columns after its own, and no other. It has ``hidden``
    elements in all: if these are as many, it suffices that no other is among them."""
    height, width = hides.shape[-2:]
    later = sum(max(0, width - 1 - row) for row in range(first, first + height))
    if hidden * height * width != later * hides.numel() or bool(hides[..., : first + 1].any()):
        return False
    return not bool(hides[..., first + 1 : first + height].tril(-1).any())


class _Rows:
    """The values of a concrete ``graph`` without inputs, computed for some rows (dim -2) at a time where they are
    large. Samples and heads (dims before) that have the same are computed once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[Value, Tensor] = {}
        self.distinct: dict[Value, Tensor] = {}
        self.left = _LARGEST

    def blocks(self, value: Value) -> Iterator[tuple[int, Tensor]]:
        """The first row of a block, and the block, which may lack dims that are expanded, and have size 1 in others
        before the rows."""
        *outer, rows, columns = map(int, self.graph.type_of(value).shape)
        step = max(1, _WHOLE // max(1, columns * int(torch.Size(outer).numel())))
        for first in range(0, rows, step):
            stop = min(first + step, rows)
            yield first, _expanded(self._some(value, first, stop), stop - first, columns)

    def _some(self, value: Value, first: int, stop: int) -> Tensor:
        """Rows of ``value``, or what broadcasts to them."""
        node, kind = self.graph[value.node], self.graph.type_of(value)
        if int(kind.numel) <= _WHOLE:
            return self._some_of_whole(value, first, stop)
        if kind.shape[-2] == 1:  # The same for all rows.
            first, stop = 0, 1
        height, width = stop - first, int(kind.shape[-1])
        if node.op in _FILLED:
            filled: Tensor = self._run(replace(node, args=((height, width), *node.args[1:])), self._small)
            return filled
        if node.op in _TRIANGLES:
            diagonal = (node.args[1] if len(node.args) > 1 else 0) + first
            rows = _expanded(self._some(node.operands[0], first, stop), height, width)
            return rows.triu(diagonal) if node.op == "aten.triu.default" else rows.tril(diagonal)
        if node.op == "aten.expand.default":
            return _expanded(self._some(node.operands[0], first, stop), height, width)
        if node.op == "aten.reshape.default" and self.graph.type_of(node.operands[0]).shape[-2:] == kind.shape[-2:]:
            rows = self._some(node.operands[0], first, stop)
            if rows.shape[:-2].numel() == 1:
                return _expanded(rows.reshape(rows.shape[-2:]), height, width)
            whole = rows.expand(*self.graph.type_of(node.operands[0]).shape[:-2], height, width)
            return whole.reshape(*kind.shape[:-2], height, width)
        if not _is_in_rows(node):
            return self._some_of_whole(value, first, stop)
        some: Tensor = self._run(node, lambda operand: self._some(operand, first, stop))
        return some

    def _some_of_whole(self, value: Value, first: int, stop: int) -> Tensor:
        if value not in self.distinct:
            self.distinct[value] = _distinct(self._small(value))
        whole = self.distinct[value]
        in_rows = whole.dim() >= 2 and whole.shape[-2] > 1
        return whole.narrow(-2, first, stop - first) if in_rows else whole

    def _whole(self, value: Value) -> Tensor:
        if value not in self.known:
            node = self.graph[value.node]
            if node.op == "constant":
                self.known[value] = _on_processor(self.graph.constants[node.name])
            else:
                results = self._run(node, self._small)
                several = results if isinstance(results, (tuple, list)) else (results,)
                self.known |= {Value(node.name, index): result for index, result in enumerate(several)}
        return self.known[value]

    def _small(self, value: Value) -> Tensor:
        numel = int(self.graph.type_of(value).numel)
        if numel > _WHOLE and value not in self.known:
            self.left -= numel
        if self.left < 0:
            raise _Unknown
        return self._whole(value)

    def _run(self, node: Node, read: Any) -> Any:
        def leaf(arg: Arg) -> Any:
            if isinstance(arg, Value):
                return read(arg)
            return torch.device("cpu") if isinstance(arg, torch.device) else arg

        operation = operation_called(node.op)
        if operation is None:
            raise _Unknown
        kwargs = {key: map_arg(arg, leaf) for key, arg in node.kwargs}
        return operation(*map_arg(node.args, leaf), **kwargs)


def _expanded(rows: Tensor, height: int, width: int) -> Tensor:
    """Rows of one sample and head, or of several, that may be the same for all columns or rows."""
    return rows.expand(*rows.shape[:-2], height, width)


def _distinct(whole: Tensor) -> Tensor:
    """``whole`` with size 1 in the dims before the last two along which it is the same."""
    for dim in range(whole.dim() - 2):
        one = whole.narrow(dim, 0, 1) if whole.shape[dim] else whole
        whole = one if torch.equal(one.expand_as(whole), whole) else whole
    return whole


def _on_processor(constant: Tensor) -> Tensor:
    """The values of a constant, which is where its model is. Raises :class:`_Unknown` if it has none."""
    if constant.is_meta or type(constant) not in (Tensor, torch.nn.Parameter):
        raise _Unknown
    return constant.detach().cpu()


def _is_in_rows(node: Node) -> bool:
    operation = operation_called(node.op)
    return node.op in _IN_ROWS or (operation is not None and torch.Tag.pointwise in operation.tags)
