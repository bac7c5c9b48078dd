"""Placements of a tensor on the axes of a device mesh, and what one device holds of it.

A *placements* tuple has one entry per mesh axis, outermost axis first, in torch's own vocabulary: ``Replicate()``,
``Shard(dim)``, ``Partial(op)``; short strings for people: ``R``, ``S(0)``, ``P(sum)``. One kind is ours:

``StridedShard(dim, before)``, printed ``S(dim/before)``: the dim, of global size D, is read as
``before x D/before`` and the second factor is sharded. It is what is left of a sharded sequence dim
after batch and sequence were flattened into one (``before`` = batch), and of a fused query-key-value projection
sharded by heads (``before`` = 3). It equals torch's ``_StridedShard(dim, split_factor=before)``.

Meaning of several axes on one dim: axes whose placements have the same ``before`` chunk the dim one after the other,
outermost axis first, by ``torch.chunk`` (so D=257 on 4 gives 65, 65, 65, 62); axes with different ``before`` shard
different factors and do not interact. Invariants, checked by :func:`is_valid`: a strided factor divides evenly, and
each factor lies wholly before or behind every other factor of its dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import OptionsError


@dataclass(frozen=True)
class StridedShard:
    """``S(dim/before)``: see the module docstring."""

    dim: int
    before: int

    def __str__(self) -> str:
        return f"S({self.dim}/{self.before})"


Placement = TorchPlacement | StridedShard
Placements = tuple[Placement, ...]
Shape = tuple[int, ...]

REPLICATE = Replicate()
PARTIAL_SUM = Partial("sum")
_PATTERN = re.compile(r"^(?:(R)|S\((\d+)\)|S\((\d+)/(\d+)\)|P(?:\((\w+)\))?)$")


@cache
def _divides(kind: Any) -> bool:
    """Whether placements of that class divide a dim; cached, since torch's own ``isinstance`` is slow here."""
    return issubclass(kind, (Shard, StridedShard))


def is_shard(placement: Placement) -> bool:
    """Whether it divides a dim (plainly or strided)."""
    kind: object = type(placement)
    return _divides(kind)


def shard_dim(placement: Placement) -> int | None:
    """The dim it divides, or None."""
    return placement.dim if is_shard(placement) else None  # type: ignore[union-attr]


def shard_before(placement: Placement) -> int:
    """The size of the factor before the sharded one: 1 for a plain ``Shard``."""
    return placement.before if isinstance(placement, StridedShard) else 1


def shard(dim: int, before: int = 1) -> Placement:
    """``Shard(dim)``, or ``StridedShard(dim, before)`` if ``before`` is more than 1."""
    return Shard(dim) if before == 1 else StridedShard(dim, before)


def coordinate_of(index: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinate of the ``index``-th device on a row-major mesh of shape ``mesh``.

    >>> coordinate_of(5, (2, 3))
    (1, 2)
    """
    coordinate = []
    for size in reversed(mesh):
        coordinate.append(index % size)
        index //= size
    return tuple(reversed(coordinate))


def short(placements: Placements | Placement) -> str:
    """``(S(0),R)`` for people; a single placement without parentheses."""
    if isinstance(placements, tuple):
        return f"({','.join(map(short, placements))})"
    return str(placements)


@cache
def parse_placement(text: str) -> Placement:
    """One placement from its short string; ``P`` means ``P(sum)``. Raises :class:`OptionsError`."""
    match = _PATTERN.match(text.strip())
    if match is None:
        raise OptionsError(f"{text!r} is not a placement; write R, S(dim), S(dim/before) or P(sum)")
    if match[1]:
        return REPLICATE
    if match[2]:
        return Shard(int(match[2]))
    if match[3]:
        return StridedShard(int(match[3]), int(match[4]))
    return Partial(match[5] or "sum")


# Before placements in a pin: all but these.
NOT = "not "


def parse_placements(text: str) -> Placements:
    """Placements from ``"(S(0),R)"`` or ``"S(0),R"``, one per mesh axis."""
    parts = re.findall(r"R|S\([\d/]+\)|P\(\w+\)|P|[^\s,()]+", text)
    return tuple(map(parse_placement, parts))


def factor_groups(placements: Placements, dim: int) -> list[tuple[int, tuple[int, ...]]]:
    """``(before, axes)`` for each sharded factor of ``dim``, outermost factor first."""
    axes_by_before: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if shard_dim(placement) == dim:
            axes_by_before.setdefault(shard_before(placement), []).append(axis)
    return [(before, tuple(axes)) for before, axes in sorted(axes_by_before.items())]


def _dim_is_valid(size: int, groups: list[tuple[int, tuple[int, ...]]], mesh: Sequence[int]) -> bool:
    for position, (before, axes) in enumerate(groups):
        degree = math.prod(mesh[axis] for axis in axes)
        if before > 1 and (size % before or (size // before) % degree):
            return False
        if position + 1 < len(groups) and groups[position + 1][0] % (before * degree):
            return False
    return True


@lru_cache(maxsize=1 << 18)
def is_valid(placements: Placements, shape: Shape, mesh: tuple[int, ...]) -> bool:
    """Whether a tensor of global ``shape`` can have these placements on the mesh (the module's invariants)."""
    dims = {shard_dim(p) for p in placements if is_shard(p)}
    if any(dim is None or dim >= len(shape) for dim in dims):
        return False
    return all(_dim_is_valid(shape[d], factor_groups(placements, d), mesh) for d in dims if d is not None)


def is_even(placements: Placements, shape: Shape, mesh: Sequence[int]) -> bool:
    """Whether every sharded dim is divided evenly."""
    dims = {d for d in map(shard_dim, placements) if d is not None}
    return all(shape[d] % math.prod(mesh[a] for a, p in enumerate(placements) if shard_dim(p) == d) == 0 for d in dims)


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of piece ``index`` of ``torch.chunk(size, parts)``; length 0 past the end."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def local_before(placements: Placements, axis: int, mesh: Sequence[int]) -> int:
    """``before`` of the placement of ``axis``, as counted on a device: divided by the degrees of the factors before
    it."""
    before, dim = shard_before(placements[axis]), shard_dim(placements[axis])
    outer = (i for i, p in enumerate(placements) if shard_dim(p) == dim and shard_before(p) < before)
    return before // math.prod(mesh[i] for i in outer)


@lru_cache(maxsize=1 << 18)
def local_shape(shape: Shape, placements: Placements, mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> Shape:
    """Shape of what the device at ``coordinate`` of the mesh holds."""
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if isinstance(placement, StridedShard):
            sizes[placement.dim] //= mesh[axis]
        elif dim is not None:
            strided = math.prod(p.before for p in placements if isinstance(p, StridedShard) and p.dim == dim) > 1
            size = sizes[dim]
            sizes[dim] = size // mesh[axis] if strided else chunk_bounds(size, mesh[axis], coordinate[axis])[1]
    return tuple(sizes)


def largest_local_shape(shape: Shape, placements: Placements, mesh: tuple[int, ...]) -> Shape:
    """The shape on the device at coordinate 0, which holds the most."""
    return local_shape(shape, placements, mesh, (0,) * len(mesh))


def local_offset(shape: Shape, placements: Placements, mesh: Sequence[int], coordinate: Sequence[int], dim: int) -> int:
    """Global index along ``dim`` of the first element the device holds; needs plain shards on that dim."""
    offset, size = 0, shape[dim]
    for axis, placement in enumerate(placements):
        if shard_dim(placement) == dim:
            start, size = chunk_bounds(size, mesh[axis], coordinate[axis])
            offset += start
    return offset


def local_runs(
    shape: Shape, placements: Placements, mesh: Sequence[int], coordinate: Sequence[int], dim: int
) -> tuple[tuple[int, int, int], ...]:
    """The global indices along ``dim`` of what the device holds, strided shards included, as nested loops from the
    outermost in: ``(start, count, step)``, an index being the sum of one ``(start + k) * step`` with ``k < count`` from
    each.

    >>> local_runs((8,), (StridedShard(0, 2),), (2,), (1,), 0)  # 2, 3, 6, 7
    ((0, 2, 4), (2, 2, 1))
    """
    start, count = 0, shape[dim]
    runs: list[tuple[int, int, int]] = []
    for before, axes in factor_groups(placements, dim):
        unit = shape[dim] // before
        if before > 1:
            runs.append((start // unit, count // unit, unit))
        start, count = 0, unit
        for axis in axes:
            moved, count = chunk_bounds(count, mesh[axis], coordinate[axis])
            start += moved
    return (*runs, (start, count, 1))


def take_shard(tensor: torch.Tensor, dim: int, before: int, parts: int, index: int) -> torch.Tensor:
    """Piece ``index`` of ``parts`` of the factor of ``dim`` that follows ``before`` (a view when ``before`` is 1)."""
    if before == 1:
        start, length = chunk_bounds(tensor.shape[dim], parts, index)
        return tensor.narrow(dim, start, length)
    count = tensor.shape[dim] // before
    split = tensor.unflatten(dim, (before, count))
    piece: torch.Tensor = split.narrow(dim + 1, index * (count // parts), count // parts)
    return piece.flatten(dim, dim + 1)


def take_local(
    tensor: torch.Tensor, placements: Placements, mesh: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """What the device at ``coordinate`` holds of a global ``tensor``; a Partial leaves the value whole (see
    :func:`autopar.runtime` for splitting a sum)."""
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            before = local_before(placements, axis, mesh)
            # Earlier strided axes of an outer factor already cut the local dim, later ones have not yet.
            before *= math.prod(
                mesh[later]
                for later in range(axis + 1, len(placements))
                if shard_dim(placements[later]) == dim and shard_before(placements[later]) < shard_before(placement)
            )
            tensor = take_shard(tensor, dim, before, mesh[axis], coordinate[axis])
    return tensor


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """One way to run an operation on one mesh axis: a placement per tensor operand and per result.

    ``local`` names the local operation that computes it when that is not the operation itself (a lookup
    in a shard of a table: ``autopar.masked_embedding``); see ``passes/rules/``.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: str = ""

    @property
    def places(self) -> tuple[Placement, ...]:
        """The placements of every operand, then of every result."""
        return (*self.inputs, *self.outputs)

    def __str__(self) -> str:
        return _arrow(self)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operation on the whole mesh: ``inputs[i]`` and ``outputs[i]`` have one placement per axis."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    local: str = ""

    @property
    def places(self) -> tuple[Placements, ...]:
        """The placements of every operand, then of every result."""
        return (*self.inputs, *self.outputs)

    def __str__(self) -> str:
        return _arrow(self)


def _arrow(strategy: AxisStrategy | Strategy) -> str:
    text = f"{' '.join(map(short, strategy.inputs))} -> {' '.join(map(short, strategy.outputs))}"
    return f"{text} [{strategy.local}]" if strategy.local else text
