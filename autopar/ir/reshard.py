"""Which single steps turn one placement of a tensor into another, and what each communicates.

A *hop* changes the placement of one mesh axis, or of several by one collective over all of them. Legal hops:

======================  ====================  ==========================================
R -> S(d)               ``slice``             local
R -> P(sum)             ``partial``           local: zero except on the first device
S(d) -> R               ``all_gather``        axes together if they divide d evenly
P(op) -> R              ``all_reduce``        axes together
P(op) -> S(d)           ``reduce_scatter``    axes together if they divide d evenly
S(d) -> S(e)            ``all_to_all``        one axis
======================  ====================  ==========================================

When several axes chunk the same factor of a dim (see :mod:`autopar.ir.placements`), a hop may touch only the
innermost of them: what the outer ones hold is contiguous only then. ``bytes`` follow nccl-tests: the full tensor of
the group (all-gather output, reduce-scatter input), padding of uneven and unequal shards included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch.distributed.tensor import Partial, Replicate

from .node import TensorType
from .placements import (
    PARTIAL_SUM,
    Placement,
    Placements,
    Shape,
    is_even,
    is_shard,
    is_valid,
    largest_local_shape,
    longest_chunk,
    shard_before,
    shard_dim,
    shares_of,
    short,
)
from .program import CollectiveKind

Sent = Literal["alone", "bucketed", "forward", "backward"]
"""How a tensor is sent: alone, in a bucket that is filled once a step (gradients, refreshed weights), or as a weight
that one phase gathers, small ones in messages of several (:mod:`.weight_messages`)."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication: its kind, the mesh axes it runs over together and the bytes of the full tensor of a group."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Hop:
    """One step ``source -> target``; ``collective`` is None for local steps (``kind`` is then slice or partial)."""

    kind: str
    axes: tuple[int, ...]
    source: Placements
    target: Placements
    collective: Collective | None

    def __str__(self) -> str:
        return f"{self.kind}{list(self.axes)} {short(self.source)} -> {short(self.target)}"


@lru_cache(maxsize=1 << 14)
def _kind(source: Placement, target: Placement) -> str | None:
    if isinstance(source, Replicate):
        return "slice" if is_shard(target) else "partial" if target == PARTIAL_SUM else None
    if isinstance(source, Partial):
        return "reduce_scatter" if is_shard(target) else "all_reduce" if isinstance(target, Replicate) else None
    if isinstance(target, Replicate):
        return "all_gather"
    return "all_to_all" if is_shard(target) and shard_dim(source) != shard_dim(target) else None


def _is_innermost(placements: Placements, axes: tuple[int, ...]) -> bool:
    """Whether no other axis inside ``axes`` chunks the same factor as one of them."""
    return not any(
        is_shard(placements[axis]) and _same_factor(placements[inner], placements[axis])
        for axis in axes
        for inner in range(axis + 1, len(placements))
        if inner not in axes
    )


def _same_factor(first: Placement, second: Placement) -> bool:
    return shard_dim(first) == shard_dim(second) and shard_before(first) == shard_before(second)


def _bytes(tensor: TensorType, kind: str, source: Placements, target: Placements, mesh: tuple[int, ...]) -> int:
    """Bytes of the full tensor of a group, uneven shards padded to the largest."""
    shape: Shape = tuple(int(s) for s in tensor.shape)
    changed = [axis for axis in range(len(mesh)) if source[axis] != target[axis]]
    group = math.prod(mesh[axis] for axis in changed)
    local = list(largest_local_shape(shape, source, mesh))
    if kind == "all_reduce":
        group = 1
    elif kind == "reduce_scatter":
        local = list(largest_local_shape(shape, target, mesh))
    elif kind == "all_to_all":
        dim = shard_dim(target[changed[0]])
        assert dim is not None
        local[dim] = longest_chunk(local[dim], group, shares_of(target[changed[0]])) * group
    return group * math.prod(local) * tensor.dtype.itemsize


def _together(
    kind: str, source: Placements, target: Placements, axes: tuple[int, ...], shape: Shape, mesh: tuple[int, ...]
) -> bool:
    """Whether one collective over all of ``axes`` can make the change: it is the same on each axis, and flat chunks
    equal nested ones."""
    if kind in ("slice", "partial", "all_to_all") or len({(source[a], target[a]) for a in axes}) > 1:
        return False
    return kind == "all_reduce" or is_even(target if kind == "reduce_scatter" else source, shape, mesh)


def make_hop(tensor: TensorType, source: Placements, target: Placements, mesh: tuple[int, ...]) -> Hop | None:
    """The hop from ``source`` to ``target`` of a tensor of that (concrete) type, or None if that takes several."""
    axes = tuple(a for a in range(len(mesh)) if source[a] != target[a])
    kinds = {_kind(source[a], target[a]) for a in axes}
    if len(kinds) != 1 or None in kinds:
        return None
    kind = str(kinds.pop())
    shape: Shape = tuple(int(s) for s in tensor.shape)
    return _hop(tensor, kind, axes, source, target, mesh) if _are_valid(source, target, shape, mesh) else None


def _hop(
    tensor: TensorType,
    kind: str,
    axes: tuple[int, ...],
    source: Placements,
    target: Placements,
    mesh: tuple[int, ...],
) -> Hop | None:
    """The hop of a kind over ``axes``, in which two valid placements differ."""
    shape: Shape = tuple(int(s) for s in tensor.shape)
    if not (_is_innermost(source, axes) and _is_innermost(target, axes)):
        return None
    if len(axes) > 1 and not _together(kind, source, target, axes, shape, mesh):
        return None
    if kind in ("slice", "partial"):
        return Hop(kind, axes, source, target, None)
    size = _bytes(tensor, kind, source, target, mesh)
    return Hop(kind, axes, source, target, Collective(kind, axes, size))  # type: ignore[arg-type]


def neighbours(
    tensor: TensorType,
    source: Placements,
    options: tuple[tuple[Placement, ...], ...],
    mesh: tuple[int, ...],
    among: Container[Placements] | None = None,
) -> Iterator[Hop]:
    """Every hop from ``source`` to placements drawn from ``options[axis]``, over axes of more than one device.
    ``among``: the valid placements, if they are known, of which ``source`` is one."""
    shape: Shape = tuple(int(s) for s in tensor.shape)
    live = [a for a in range(len(mesh)) if mesh[a] > 1]
    for count in range(1, len(live) + 1):
        for axes in itertools.combinations(live, count):
            for choice in dict.fromkeys(p for a in axes for p in options[a]):
                if any(source[a] == choice for a in axes):
                    continue
                target = tuple(choice if a in axes else p for a, p in enumerate(source))
                if target not in among if among is not None else not _are_valid(source, target, shape, mesh):
                    continue
                kinds = {_kind(source[a], choice) for a in axes}
                kind = kinds.pop()
                hop = None if kinds or kind is None else _hop(tensor, kind, axes, source, target, mesh)
                if hop is not None:
                    yield hop


@lru_cache(maxsize=256)  # Chosen: a Llama has 70 types on a mesh of two axes, each with some 100 KiB of hops.
def hops_among(
    tensor: TensorType, options: tuple[tuple[Placement, ...], ...], mesh: tuple[int, ...]
) -> tuple[tuple[Placements, ...], Mapping[tuple[int, int], Hop]]:
    """The valid placements drawn from ``options[axis]``, and every hop of :func:`neighbours` between them, by their
    numbers. They are the same at any price, and so for most tensors of the graphs that one search prices."""
    shape: Shape = tuple(int(s) for s in tensor.shape)
    states = {p: i for i, p in enumerate(p for p in itertools.product(*options) if is_valid(p, shape, mesh))}
    hops = {
        (start, states[hop.target]): hop
        for state, start in states.items()
        for hop in neighbours(tensor, state, options, mesh, states)
    }
    return tuple(states), hops


def _are_valid(source: Placements, target: Placements, shape: Shape, mesh: tuple[int, ...]) -> bool:
    return is_valid(source, shape, mesh) and is_valid(target, shape, mesh)
