"""Which parts of a tensor travel between two meshes: the intersections of what each sender and each receiver holds.

Between equal meshes and placements every device sends its shard to its counterpart. Otherwise a receiver is sent the
parts of its shard by devices that hold them: of several that hold the same, receivers take turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .placements import Placements, Shape, coordinate_of, local_runs, local_shape

Span = tuple[int, int]
Box = tuple[Span, ...]
"""For each dim, start and length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part that device ``sender`` of one mesh sends to device ``receiver`` of the other, both row-major: its place
    in the local tensor of each."""

    sender: int
    receiver: int
    sent: Box
    received: Box

    @property
    def elements(self) -> int:
        return math.prod(length for _, length in self.sent)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is placed on one of the meshes."""

    placements: Placements
    mesh: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    def shard(self, shape: Shape, device: int) -> Shape:
        return local_shape(shape, self.placements, self.mesh, coordinate_of(device, self.mesh))


@lru_cache(maxsize=1 << 12)
def wire_pieces(shape: Shape, source: Layout, target: Layout) -> tuple[Piece, ...]:
    """All parts of a tensor of global ``shape``, in the order in which every device sends and receives them. Neither
    layout has partial sums."""
    if 0 in shape:
        return ()
    if source == target:
        return tuple(_to_counterparts(shape, source))
    held, wanted = _holdings(shape, source), _holdings(shape, target)
    senders, receivers = _alike(held), _alike(wanted)
    pieces: list[Piece] = []
    for key, takers in receivers.items():
        for turn, receiver in enumerate(takers):
            for other, givers in senders.items():
                sender = givers[turn * len(givers) // len(takers)]
                pieces += (Piece(sender, receiver, *boxes) for boxes in _common(other, key))
    return tuple(sorted(pieces, key=lambda piece: (piece.sender, piece.receiver, piece.sent)))


def busiest_elements(shape: Shape, source: Layout, target: Layout) -> int:
    """The most elements that one device sends or receives."""
    sent, received = [0] * source.devices, [0] * target.devices
    for piece in wire_pieces(shape, source, target):
        sent[piece.sender] += piece.elements
        received[piece.receiver] += piece.elements
    return max(*sent, *received)


def _to_counterparts(shape: Shape, layout: Layout) -> Iterator[Piece]:
    for device in range(layout.devices):
        box = tuple((0, size) for size in layout.shard(shape, device))
        if all(length for _, length in box):
            yield Piece(device, device, box, box)


# For each dim, the runs of global indices that a device holds: first index and length, in local order.
_Held = tuple[tuple[Span, ...], ...]


def _holdings(shape: Shape, layout: Layout) -> list[_Held]:
    return [_held(shape, layout, coordinate_of(device, layout.mesh)) for device in range(layout.devices)]


def _held(shape: Shape, layout: Layout, coordinate: tuple[int, ...]) -> _Held:
    return tuple(_runs(shape, layout, coordinate, dim) for dim in range(len(shape)))


def _runs(shape: Shape, layout: Layout, coordinate: tuple[int, ...], dim: int) -> tuple[Span, ...]:
    *outer, (start, count, _) = local_runs(shape, layout.placements, layout.mesh, coordinate, dim)
    starts = itertools.product(*(range(first * step, (first + many) * step, step) for first, many, step in outer))
    return tuple((sum(each) + start, count) for each in starts if count)


def _alike(holdings: list[_Held]) -> dict[_Held, list[int]]:
    """The devices by what they hold."""
    found: dict[_Held, list[int]] = {}
    for device, held in enumerate(holdings):
        found.setdefault(held, []).append(device)
    return found


def _common(held: _Held, wanted: _Held) -> Iterator[tuple[Box, Box]]:
    """The boxes of what both have, as local to the one and to the other."""
    per_dim = [list(_overlaps(mine, its)) for mine, its in zip(held, wanted, strict=True)]
    for spans in itertools.product(*per_dim):
        yield tuple((a, length) for a, _, length in spans), tuple((b, length) for _, b, length in spans)


def _overlaps(held: tuple[Span, ...], wanted: tuple[Span, ...]) -> Iterator[tuple[int, int, int]]:
    """(local start in the one, in the other, length) of every overlap of two ascending lists of runs."""
    mine, its = 0, 0
    i = j = 0
    while i < len(held) and j < len(wanted):
        (a, n), (b, m) = held[i], wanted[j]
        start, end = max(a, b), min(a + n, b + m)
        if start < end:
            yield mine + start - a, its + start - b, end - start
        if a + n <= b + m:
            i, mine = i + 1, mine + n
        else:
            j, its = j + 1, its + m
