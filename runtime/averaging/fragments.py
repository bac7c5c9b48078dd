"""Parts of the parameters that are exchanged together, and the steps at which they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.sync import LocalSGD

from .pieces import Piece


@dataclass(frozen=True)
class Fragment:
    """``pieces`` are exchanged after the optimizer steps of which ``offset`` is left when they are divided by
    ``every``. ``buffers``, which only the first fragment has, take the mean."""

    pieces: tuple[Piece, ...]
    buffers: tuple[Piece, ...]
    every: int
    offset: int

    def is_due(self, step: int) -> bool:
        """Whether the exchange begins after optimizer step ``step``, counted from 1."""
        return step % self.every == self.offset


def fragments_of(sync: LocalSGD, pieces: Sequence[Piece], buffers: Sequence[Piece]) -> tuple[Fragment, ...]:
    """The parameters in their order, cut into ``sync.fragments`` parts of about as many elements, at steps evenly
    spread; the first is exchanged at the multiples of ``sync.every``."""
    total, before = sum(piece.size for piece in pieces), 0
    members: list[list[Piece]] = [[] for _ in range(sync.fragments)]
    for piece in pieces:
        middle = before + piece.size / 2
        members[min(sync.fragments - 1, int(middle * sync.fragments / max(total, 1)))].append(piece)
        before += piece.size
    return tuple(
        Fragment(tuple(own), () if number else tuple(buffers), sync.every, number * sync.every // sync.fragments)
        for number, own in enumerate(members)
    )
