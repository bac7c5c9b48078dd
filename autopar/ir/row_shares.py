"""Rows in unequal shares: how many each device has, where the shares do not divide them exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .placements import Shares, coordinate_of


def apportioned(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """``rows`` in about these shares, at least one each; empty if there are not enough. A further row goes to the
    device that then has fewest for its share.

    >>> apportioned(8, (3, 1)), apportioned(6, (3, 1)), apportioned(2, (3, 1))
    ((6, 2), (5, 1), (1, 1))
    """
    if rows < len(shares):
        return ()
    devices = range(len(shares))
    taken = [max(1, rows * share // sum(shares)) for share in shares]
    while sum(taken) > rows:  # Of those that were given a first row beyond their share, others had less.
        taken[max((d for d in devices if taken[d] > 1), key=lambda d: taken[d] / shares[d])] -= 1
    while sum(taken) < rows:
        taken[min(devices, key=lambda d: (taken[d] + 1) / shares[d])] += 1
    return tuple(taken)


def rank_shares(stages: int, mesh: tuple[int, ...], shares: Shares) -> tuple[int, ...]:
    """For each rank of ``stages`` meshes its share of the rows of a batch that ranks read for each other; empty: all
    read as many."""
    if not any(shares):
        return ()
    places = (zip(shares, coordinate_of(device, mesh), strict=True) for device in range(math.prod(mesh)))
    return tuple(math.prod(each[at] for each, at in place if each) for place in places) * stages
