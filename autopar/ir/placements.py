"""Placements of a tensor on the axes of a device mesh, and what one device holds of it.

A *placements* tuple has one entry per mesh axis, outermost axis first, in torch's own vocabulary: ``Replicate()``,
``Shard(dim)``, ``Partial(op)``; short strings for people: ``R``, ``S(0)``, ``P(sum)``. One kind is ours:

``StridedShard(dim, before)``, printed ``S(dim/before)``: the dim, of global size D, is read as
``before x D/before`` and the second factor is sharded. It is what is left of a sharded sequence dim
after batch and sequence were flattened into one (``before`` = batch), and of a fused query-key-value projection
sharded by heads (``before`` = 3). It equals torch's ``_StridedShard(dim, split_factor=before)``.

``UnequalShard(dim, shares, before)``, printed ``S(dim:3+1)`` or ``S(dim/before:3+1)``, divides the same factor in the
proportion of ``shares``, one for each device of the axis: rows of a batch among devices of unequal speed. Their sum
divides the factor, so that what is cut in proportion stays so when dims are joined or split. Parameters never have it.

Meaning of several axes on one dim: axes whose placements have the same ``before`` chunk the dim one after the other,
outermost axis first, by ``torch.chunk`` (so D=257 on 4 gives 65, 65, 65, 62); axes with different ``before`` shard
different factors and do not interact. Invariants, checked by :func:`is_valid`: a strided factor divides evenly,
shares divide exactly, and each factor lies wholly before or behind every other factor of its dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True)
class UnequalShard:
    """``S(dim:3+1)``: see the module docstring."""

    dim: int
    shares: tuple[int, ...]
    before: int = 1

    def __str__(self) -> str:
        factor = f"/{self.before}" if self.before > 1 else ""
        return f"S({self.dim}{factor}:{'+'.join(map(str, self.shares))})"


Placement = TorchPlacement | StridedShard | UnequalShard
Placements = tuple[Placement, ...]
Shape = tuple[int, ...]
Shares = tuple[tuple[int, ...], ...]
"""For each axis of a mesh the shares in which it may divide rows, empty if equal ones; empty if all axes have these."""

REPLICATE = Replicate()
PARTIAL_SUM = Partial("sum")
OWN_KINDS = (StridedShard, UnequalShard)
# What partial results are joined by; torch 2.11 does not list them.
_OPERATIONS = ("sum", "avg", "min", "max", "product")
_NUMBER = r"\d{1,9}"
_SHARD = rf"S\(({_NUMBER})(?:/({_NUMBER}))?(?::({_NUMBER}(?:\+{_NUMBER})*))?\)"
_PATTERN = re.compile(rf"(R)|{_SHARD}|P(?:\(({'|'.join(_OPERATIONS)})\))?", re.ASCII)


@cache
def _divides(kind: Any) -> bool:
    """Whether placements of that class divide a dim; cached, since torch's own ``isinstance`` is slow here."""
    return issubclass(kind, (Shard, *OWN_KINDS))


def is_shard(placement: Placement) -> bool:
    """Whether it divides a dim (plainly or strided)."""
    kind: object = type(placement)
    return _divides(kind)


def shard_dim(placement: Placement) -> int | None:
    """The dim it divides, or None."""
    return placement.dim if is_shard(placement) else None  # type: ignore[union-attr]


def shard_before(placement: Placement) -> int:
    """The size of the factor before the sharded one: 1 for a plain ``Shard``."""
    return placement.before if isinstance(placement, OWN_KINDS) else 1


def shares_of(placement: Placement) -> tuple[int, ...]:
    """The shares in which it divides its dim; empty: equal ones."""
    return placement.shares if isinstance(placement, UnequalShard) else ()


def shard(dim: int, before: int = 1, shares: tuple[int, ...] = ()) -> Placement:
    """``Shard(dim)``, or what divides the factor behind ``before``, in these ``shares``."""
    if shares:
        return UnequalShard(dim, shares, before)
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


def index_of(coordinate: Sequence[int], mesh: Sequence[int]) -> int:
    """The inverse of :func:`coordinate_of`.

    >>> index_of((1, 2), (2, 3))
    5
    """
    index = 0
    for at, size in zip(coordinate, mesh, strict=True):
        index = index * size + at
    return index


def short(placements: Placements | Placement) -> str:
    """``(S(0),R)`` for people; a single placement without parentheses."""
    if isinstance(placements, tuple):
        return f"({','.join(map(short, placements))})"
    return str(placements)


_WRITTEN = "write R, S(dim), S(dim/before), S(dim:3+1) or P(sum)"


@cache
def parse_placement(text: str) -> Placement:
    """One placement from its short string; ``P`` means ``P(sum)``. Raises :class:`OptionsError`."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise OptionsError(f"{text!r} is not a placement; {_WRITTEN}")
    if match[1]:
        return REPLICATE
    if match[2]:
        shares = tuple(map(int, match[4].split("+"))) if match[4] else ()
        return shard(int(match[2]), int(match[3] or 1), shares)
    return Partial(match[5] or "sum")


# Before placements in a pin: all but these.
NOT = "not "


@lru_cache(maxsize=1 << 14)
def parse_placements(text: str) -> Placements:
    """Placements from ``"(S(0),R)"`` or ``"S(0),R"``, one per mesh axis. Raises :class:`OptionsError` that names what
    is no placement."""
    opened, closed = text.count("("), text.count(")")
    if opened != closed:
        raise OptionsError(f"{text!r} has {opened} '(' and {closed} ')'; {_WRITTEN} for each axis")
    inner = text.strip()
    if inner.startswith("("):
        inner = inner.removeprefix("(").removesuffix(")")
        if not inner.strip():
            return ()
    parts = inner.split(",")
    if len(parts) > 1 and not all(map(str.strip, parts)):
        raise OptionsError(f"{text!r} has an empty place between or beside its commas; {_WRITTEN} for each axis")
    return tuple(map(parse_placement, parts))


def factor_groups(placements: Placements, dim: int) -> list[tuple[int, tuple[int, ...]]]:
    """``(before, axes)`` for each sharded factor of ``dim``, outermost factor first."""
    axes_by_before: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if shard_dim(placement) == dim:
            axes_by_before.setdefault(shard_before(placement), []).append(axis)
    return [(before, tuple(axes)) for before, axes in sorted(axes_by_before.items())]


def _parts(placement: Placement, devices: int) -> int:
    """In how many equal parts a dim is read that is divided so."""
    return sum(shares_of(placement)) or devices


def _dim_is_valid(
    size: int, groups: list[tuple[int, tuple[int, ...]]], placements: Placements, mesh: Sequence[int]
) -> bool:
    for position, (before, axes) in enumerate(groups):
        degrees = [_parts(placements[axis], mesh[axis]) for axis in axes]
        degree = math.prod(degrees)
        if before > 1 and (size % before or (size // before) % degree):
            return False
        unequal = [place for place, axis in enumerate(axes) if shares_of(placements[axis])]
        if unequal and size // before % math.prod(degrees[: unequal[-1] + 1]):
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
    if any(len(shares_of(p)) not in (0, devices) for p, devices in zip(placements, mesh, strict=True)):
        return False
    return all(_dim_is_valid(shape[d], factor_groups(placements, d), placements, mesh) for d in dims if d is not None)


def is_even(placements: Placements, shape: Shape, mesh: Sequence[int]) -> bool:
    """Whether every sharded dim is divided evenly."""
    if any(map(shares_of, placements)):
        return False
    dims = {d for d in map(shard_dim, placements) if d is not None}
    return all(shape[d] % math.prod(mesh[a] for a, p in enumerate(placements) if shard_dim(p) == d) == 0 for d in dims)


def chunk_bounds(size: int, parts: int, index: int, shares: tuple[int, ...] = ()) -> tuple[int, int]:
    """Start and length of piece ``index`` of a dim: those of ``torch.chunk(size, parts)``, with length 0 past the end,
    or those of ``shares``, whose sum divides the size.

    >>> chunk_bounds(8, 2, 1, (3, 1))
    (6, 2)
    """
    if shares:
        unit = size // sum(shares)
        return unit * sum(shares[:index]), unit * shares[index]
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def longest_chunk(size: int, parts: int, shares: tuple[int, ...] = ()) -> int:
    """The length of the longest of these pieces."""
    return size // sum(shares) * max(shares) if shares else -(-size // parts)


def local_before(placements: Placements, axis: int, mesh: Sequence[int], coordinate: Sequence[int]) -> int:
    """``before`` of the placement of ``axis``, as counted on a device: divided as the factors before it are."""
    return before_after(placements, axis, mesh, coordinate, range(len(placements)))


def before_after(
    placements: Placements, axis: int, mesh: Sequence[int], coordinate: Sequence[int], cut: Iterable[int]
) -> int:
    """:func:`local_before` where only the axes ``cut`` have divided the dim."""
    dim, left = shard_dim(placements[axis]), shard_before(placements[axis])
    for outer in cut:
        placement = placements[outer]
        if shard_dim(placement) == dim and shard_before(placement) < shard_before(placements[axis]):
            shares = shares_of(placement)
            left = chunk_bounds(left, mesh[outer], coordinate[outer], shares)[1] if shares else left // mesh[outer]
    return left


@lru_cache(maxsize=1 << 18)
def local_shape(shape: Shape, placements: Placements, mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> Shape:
    """Shape of what the device at ``coordinate`` of the mesh holds."""
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        dim, shares = shard_dim(placement), shares_of(placement)
        if dim is None:
            continue
        # Where a factor lies before or behind another, both divide evenly, and the order does not matter.
        strided = any(shard_before(p) > 1 and shard_dim(p) == dim for p in placements)
        if strided and not shares:
            sizes[dim] //= mesh[axis]
        else:
            sizes[dim] = chunk_bounds(sizes[dim], mesh[axis], coordinate[axis], shares)[1]
    return tuple(sizes)


def fullest_coordinate(mesh: Sequence[int], shares: Shares) -> tuple[int, ...]:
    """The coordinate of the first device that holds the most of whatever is divided in ``shares``."""
    return tuple(each.index(max(each)) if each else 0 for each in shares or ((),) * len(mesh))


@lru_cache(maxsize=1 << 18)
def largest_local_shape(shape: Shape, placements: Placements, mesh: tuple[int, ...]) -> Shape:
    """The shape on the device that holds the most: at coordinate 0 if shares are equal."""
    return local_shape(shape, placements, mesh, fullest_coordinate(mesh, tuple(map(shares_of, placements))))


def local_offset(shape: Shape, placements: Placements, mesh: Sequence[int], coordinate: Sequence[int], dim: int) -> int:
    """Global index along ``dim`` of the first element the device holds; needs plain shards on that dim."""
    offset, size = 0, shape[dim]
    for axis, placement in enumerate(placements):
        if shard_dim(placement) == dim:
            start, size = chunk_bounds(size, mesh[axis], coordinate[axis], shares_of(placement))
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
            moved, count = chunk_bounds(count, mesh[axis], coordinate[axis], shares_of(placements[axis]))
            start += moved
    return (*runs, (start, count, 1))


def take_shard(
    tensor: torch.Tensor, dim: int, before: int, parts: int, index: int, shares: tuple[int, ...] = ()
) -> torch.Tensor:
    """Piece ``index`` of ``parts`` of the factor of ``dim`` that follows ``before`` (a view when ``before`` is 1)."""
    if before == 1:
        start, length = chunk_bounds(tensor.shape[dim], parts, index, shares)
        return tensor.narrow(dim, start, length)
    count = tensor.shape[dim] // before
    split = tensor.unflatten(dim, (before, count))
    piece: torch.Tensor = split.narrow(dim + 1, *chunk_bounds(count, parts, index, shares))
    return piece.flatten(dim, dim + 1)


def take_local(
    tensor: torch.Tensor, placements: Placements, mesh: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """What the device at ``coordinate`` holds of a global ``tensor``; a Partial leaves the value whole (see
    :func:`autopar.runtime` for splitting a sum)."""
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            # Earlier axes of an outer factor have cut the local dim already, later ones have not yet.
            before = before_after(placements, axis, mesh, coordinate, range(axis))
            tensor = take_shard(tensor, dim, before, mesh[axis], coordinate[axis], shares_of(placement))
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
