"""A section that communicates beside what its rank computes meanwhile: the rest of the reduction of a chunk's
gradients, the first messages of which its last backward has started."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from autopar.ir.program import Section
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.groups import MeshGroups

from .executor import operations_of, plainly
from .section_code import SectionCode
from .section_source import WAIT, Source

Steps = Generator[None, None, list[torch.Tensor]]


class Reducer:
    """``section`` on ``groups``, begun again and again."""

    def __init__(self, section: Section, groups: MeshGroups, where: str) -> None:
        self.device = groups.device
        source = Source(section, operations_of(Collectives(groups)), groups.device, pauses=True)
        self.code = SectionCode(section, source, where)
        self.waits = sum(instruction.op == WAIT for instruction in section.instructions)

    def begin(self, under_way: list[torch.Tensor], computations: int) -> Reduction:
        """Goes on with gradients ``under_way``, a list it empties. So many ``computations`` of the rank are still to
        come."""
        self.code.check(under_way)
        found = Reduction(self, self.code.function(under_way), computations)
        found.go_on(0)
        return found


class Reduction:
    """One under way. It stands before a wait, and goes on at places of the schedule that are the same on all ranks of
    the stage, never when a message happens to be there: collectives of a group must come in one order."""

    def __init__(self, reducer: Reducer, steps: Steps, computations: int) -> None:
        self._reducer, self._steps, self._computations = reducer, steps, computations
        self._waited = -1
        self._computed = 0
        self._made: list[Any] | None = None

    def before_computation(self) -> None:
        """The rank is about to compute: awaits as many messages as is its share, which makes room for further ones. Of
        those that were started none is awaited before something was computed."""
        self.go_on(self._reducer.waits * self._computed // max(self._computations, 1))
        self._computed += 1

    def finish(self) -> list[torch.Tensor]:
        """All gradients, as stored."""
        self.go_on(self._reducer.waits)
        assert self._made is not None
        return self._made

    def go_on(self, waits: int) -> None:
        """Until so many messages were awaited, up to the next wait."""
        with plainly(self._reducer.device), self._reducer.code.explaining():
            while self._made is None and self._waited < waits:
                try:
                    next(self._steps)
                except StopIteration as end:
                    self._made = end.value
                self._waited += 1
