"""Whether placements on meshes with different numbers of axes say the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.ir.placements import REPLICATE, Placements, Strategy

Mesh = Sequence[int]


def is_alike(before: Placements, after: Placements, old: Mesh, new: Mesh) -> bool:
    """Whether a tensor is placed alike before, on the ``old`` mesh, and ``after``, on the ``new`` one. On as many axes
    the placements must be equal. Otherwise only their number may differ: neighbouring axes with one placement count as
    one, those of one device not at all. How many devices an axis has is the mesh's to say, as where the axes are the
    same.

    >>> from autopar.ir.placements import parse_placements
    >>> is_alike(parse_placements("S(0),R"), parse_placements("S(0),S(0),R"), (4, 2), (2, 2, 2))
    True
    """
    if len(old) == len(new):
        return before == after
    return _reading(before, old) == _reading(after, new)


def runs_alike(before: Strategy | None, after: Strategy | None, old: Mesh, new: Mesh) -> bool:
    """:func:`is_alike` of all that an operation takes and returns; None: it does not run."""
    if before is None or after is None or before == after:
        return before == after
    if (before.local, len(before.inputs), len(before.outputs)) != (after.local, len(after.inputs), len(after.outputs)):
        return False
    return all(is_alike(*pair, old, new) for pair in zip(before.places, after.places, strict=True))


def _reading(placements: Placements, mesh: Mesh) -> Placements:
    """The placements by which a tensor is divided, each once; none if it is whole everywhere."""
    told = (place for place, size in zip(placements, mesh, strict=True) if size > 1)
    joined = tuple(place for place, _ in itertools.groupby(told))
    return () if joined == (REPLICATE,) else joined
