"""The part of a plan that says how a pipeline is cut and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .schedule import Schedule
from .spec import Placements
from .stages import Edge


@dataclass(frozen=True)
class PlannedPipeline:
    """``cuts``: the forward nodes at which chunks 1, 2, ... begin (:mod:`autopar.stages`). ``schedule``: what each
    pipeline rank does. ``wires``: how the value of each edge lies while it travels, on the mesh inside a stage.

    Pipeline rank s is the s-th block of consecutive devices, each block a mesh of the plan's shape. One chunk and
    several microbatches is gradient accumulation.
    """

    cuts: tuple[str, ...]
    schedule: Schedule
    wires: Mapping[Edge, Placements] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        return len(self.cuts) + 1
