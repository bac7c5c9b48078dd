"""The meshes inside the stages of a pipeline, which may be of unequal numbers of devices.

Pipeline rank s has consecutive devices, those after the devices of rank s - 1. All meshes have equally many axes, so
that a placement reads the same in each; on an axis of one device every placement is a replica.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from .placements import REPLICATE, Placements, coordinate_of

Mesh = tuple[int, ...]


@dataclass(frozen=True)
class StageMeshes:
    """``meshes``: that of each pipeline rank.

    >>> unequal = StageMeshes(((1,), (3,)))
    >>> unequal.devices, unequal.ranks(1), unequal.place(2)
    (4, range(1, 4), (1, (1,)))
    """

    meshes: tuple[Mesh, ...]

    @staticmethod
    def equal(stages: int, mesh: Mesh) -> StageMeshes:
        return StageMeshes((mesh,) * stages)

    @property
    def stages(self) -> int:
        return len(self.meshes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The devices of each stage."""
        return tuple(math.prod(mesh) for mesh in self.meshes)

    @property
    def devices(self) -> int:
        return sum(self.sizes)

    @property
    def are_equal(self) -> bool:
        return len(set(self.meshes)) == 1

    @property
    def largest(self) -> Mesh:
        """The mesh of the first stage with the most devices."""
        return max(self.meshes, key=math.prod)

    def ranks(self, stage: int) -> range:
        """The devices of a stage, counted over all stages."""
        first = sum(self.sizes[:stage])
        return range(first, first + self.sizes[stage])

    def place(self, index: int) -> tuple[int, Mesh]:
        """The stage of the ``index``-th device, and its coordinate there."""
        ends = itertools.accumulate(self.sizes)
        stage = next(stage for stage, end in enumerate(ends) if index < end)
        return stage, coordinate_of(index - self.ranks(stage).start, self.meshes[stage])

    @property
    def whole(self) -> Mesh:
        """The mesh of all devices: the stages first where they are alike, otherwise one axis."""
        return (self.stages, *self.meshes[0]) if self.are_equal else (self.devices,)

    def __str__(self) -> str:
        if self.are_equal:
            return f"mesh {self.meshes[0]}"
        return f"meshes {', '.join(map(str, self.meshes))}"


def on_axes(placements: Placements, mesh: Mesh) -> Placements:
    """``placements`` as they read on ``mesh``: a replica on each axis of one device."""
    return tuple(place if devices > 1 else REPLICATE for place, devices in zip(placements, mesh, strict=True))
