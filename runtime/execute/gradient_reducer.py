"""Completes the reduction of a chunk's gradients, which its last backward has started, while the rank computes."""

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
    """``section`` on ``groups``, run once a step."""

    def __init__(self, section: Section, groups: MeshGroups, where: str) -> None:
        self.device = groups.device
        source = Source(section, operations_of(Collectives(groups)), groups.device, pauses=True)
        self.code = SectionCode(section, source, where)
        self.waits = sum(instruction.op == WAIT for instruction in section.instructions)

    def begin(self, in_flight: list[torch.Tensor], computations: int) -> Reduction:
        """Begins to complete the reduction of gradients ``in_flight``, a list it empties. ``computations``: how many
        computations of the rank are still to come."""
        self.code.check(in_flight)
        reduction = Reduction(self, self.code.function(in_flight), computations)
        reduction.advance(0)
        return reduction


class Reduction:
    """A reduction in progress, stopped before a wait. It advances at points of the schedule that are the same on all
    ranks of the stage, never when a message happens to arrive: collectives of a group must have one order."""

    def __init__(self, reducer: Reducer, steps: Steps, computations: int) -> None:
        self._reducer, self._steps, self._computations = reducer, steps, computations
        self._waited = -1
        self._computed = 0
        self._gradients: list[Any] | None = None

    def before_computation(self) -> None:
        """Called before each computation: waits for a proportional share of messages, which makes room for further
        ones. Waits for none before the first computation."""
        self.advance(self._reducer.waits * self._computed // max(self._computations, 1))
        self._computed += 1

    def finish(self) -> list[torch.Tensor]:
        """Waits for all messages. Returns all gradients, as stored."""
        self.advance(self._reducer.waits)
        assert self._gradients is not None
        return self._gradients

    def advance(self, waits: int) -> None:
        """Runs until that many messages have been awaited, up to the next wait."""
        with plainly(self._reducer.device), self._reducer.code.explaining():
            while self._gradients is None and self._waited < waits:
                try:
                    next(self._steps)
                except StopIteration as end:
                    self._gradients = end.value
                self._waited += 1
