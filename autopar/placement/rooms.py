"""What each device may hold, where devices of different memory have unequal shares of the rows.

All of them hold as much of whatever is not divided in shares, and each its own part of the rest. A *room* is what the
devices in one place may hold. The placement program has one number of bytes for each choice, and one limit, that of the
smallest room: bytes in a room twice as large count half, and a choice counts as much as in the room where it counts
most. What is within the limit thus fits into every room. The converse holds wherever one room is the tightest for all
that is divided and for all that is not: where a device has at least as much of the rows for its memory as any larger
one. (A larger device with more rows than its memory's share is counted as if it were as full of weights as the
smallest.) Values are not moved between equal rows and others: on its way a tensor is whole, which is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.node import TensorType
from autopar.ir.placements import Placements, Shares, coordinate_of, is_shard, local_shape, shares_of


@dataclass(frozen=True, slots=True)
class Room:
    """``limit``: bytes that the device at ``coordinate`` of the mesh, and those with as many rows, may hold."""

    coordinate: tuple[int, ...]
    limit: float

    def bytes_of(self, kind: TensorType, placements: Placements, mesh: tuple[int, ...]) -> int:
        """Bytes of the shard that rests here of a tensor of global type ``kind``."""
        shape = local_shape(tuple(map(int, kind.shape)), placements, mesh, self.coordinate)
        return int(TensorType(shape, kind.dtype).bytes)

    def counted(self, nbytes: int, least: float) -> int:
        """``nbytes`` here, in bytes of a room of ``least``."""
        return nbytes if self.limit <= least else math.ceil(nbytes * (least / self.limit))


def rooms_of(limits: Sequence[int], mesh: tuple[int, ...], shares: Shares, block: int | None) -> tuple[Room, ...]:
    """A room for each place among the unequal ``shares``; none if all may hold as much. ``limits``: bytes by rank, of
    all blocks of as many devices as ``mesh`` has; ``block``: the one in question, None for a program of all of them,
    whose rooms are the sums of theirs."""
    if not any(shares) or len(set(limits)) < 2:
        return ()
    devices = math.prod(mesh)
    least: dict[tuple[tuple[int, ...], int], float] = {}
    for rank, limit in enumerate(map(float, limits)):
        key = seat_of(rank % devices, mesh, shares), rank // devices
        if block in (None, key[1]):
            least[key] = min(limit, least.get(key, math.inf))
    rooms: dict[tuple[int, ...], float] = {}
    for (seat, _), limit in least.items():
        rooms[seat] = rooms.get(seat, 0.0) + limit
    alike = len(set(rooms.values())) < 2
    return () if alike else tuple(Room(seat, limit) for seat, limit in rooms.items())


def seat_of(device: int, mesh: tuple[int, ...], shares: Shares) -> tuple[int, ...]:
    """The first coordinate with the same place among the ``shares`` as the ``device``-th of the mesh."""
    return tuple(at if each else 0 for at, each in zip(coordinate_of(device, mesh), shares, strict=True))


def between_shares(states: Sequence[Placements], shares: Shares) -> NDArray[np.bool_]:
    """For each pair of states, whether one divides a tensor equally on an axis that has unequal ``shares``, and the
    other unequally on such an axis."""
    axes = [axis for axis, each in enumerate(shares) if each]
    unequal = np.array([any(shares_of(state[axis]) for axis in axes) for state in states])
    equal = np.array([any(is_shard(state[axis]) and not shares_of(state[axis]) for axis in axes) for state in states])
    one_way: NDArray[np.bool_] = equal[:, None] & unequal[None, :]
    return one_way | one_way.T


def counted_bytes(kind: TensorType, placements: Placements, mesh: tuple[int, ...], rooms: Sequence[Room]) -> int:
    """What a tensor counts against the limit of the smallest of ``rooms``."""
    least = min(room.limit for room in rooms)
    return max(room.counted(room.bytes_of(kind, placements, mesh), least) for room in rooms)
