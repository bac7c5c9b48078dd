"""Parameters that chunks on several stages use: one stage owns each, the others borrow it for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from autopar.ir.pipeline_program import PipelineProgram, StagedParameter
from autopar.ir.placements import Placements
from autopar.ir.stage_meshes import StageMeshes
from autopar.ir.wire_pieces import Layout

from .point_to_point import Arrival, Crossing, Messenger


class Seat(Protocol):
    """A rank's place in a pipeline: its ``stage``, and its ``index`` among the devices of that."""

    @property
    def meshes(self) -> StageMeshes: ...
    @property
    def stage(self) -> int: ...
    @property
    def index(self) -> int: ...


class SharedWeights:
    """Sends shared parameters and sums their gradients. Every rank iterates over parameters and stages in the same
    order, so that messages match. ``messenger`` makes what sends them, for a seat."""

    def __init__(
        self, program: PipelineProgram, stages: Seat, messenger: Callable[[Any], Messenger] = Messenger
    ) -> None:
        self.program, self.stages, self.messenger = program, stages, messenger
        self.shared = [p for p in program.parameters if len(p.chunks) > 1]

    def spread(self, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Stored local tensors by path, with those of other stages' parameters received from their owners."""
        messenger, arriving = self.messenger(self.stages), {}
        for parameter in self.shared:
            path, owner = parameter.slot.target, self._stage(parameter.owner)
            for stage in self._stages(parameter, parameter.chunks):
                if owner == self.stages.stage:
                    messenger.send([stored[path]], [self._crossing(parameter, stage, sends=True)], stage)
                elif stage == self.stages.stage:
                    arriving[path] = messenger.receive([self._crossing(parameter, owner, sends=False)], owner)
        spread = stored | {path: arrival.wait()[0] for path, arrival in arriving.items()}
        messenger.finish()
        return spread

    def add_up(self, parts: Mapping[tuple[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums the gradients ``parts`` (by chunk and path) of all stages. Returns them by path, on the owner's
        stage."""
        totals: dict[str, torch.Tensor] = {}
        for (_, path), part in parts.items():
            totals[path] = totals[path].add_(part) if path in totals else part
        messenger, arriving = self.messenger(self.stages), list[tuple[str, Arrival]]()
        for parameter in self.shared:
            path, owner = parameter.slot.target, self._stage(parameter.owner)
            for stage in self._stages(parameter, parameter.gradients):
                if stage == self.stages.stage:
                    messenger.send([totals[path]], [self._crossing(parameter, owner, sends=True)], owner)
                elif owner == self.stages.stage:
                    crossing = self._crossing(parameter, stage, sends=False)
                    arriving.append((path, messenger.receive([crossing], stage)))
        for path, arrival in arriving:
            (part,) = arrival.wait()
            totals[path] = totals[path].add_(part) if path in totals else part
        messenger.finish()
        return totals

    def _stage(self, chunk: int) -> int:
        return self.program.stage_of(chunk)

    def _stages(self, parameter: StagedParameter, chunks: tuple[int, ...]) -> list[int]:
        """The stages of ``chunks`` other than the owner's."""
        return sorted({self._stage(chunk) for chunk in chunks} - {self._stage(parameter.owner)})

    def _crossing(self, parameter: StagedParameter, other: int, *, sends: bool) -> Crossing:
        """What this rank sends of a stored parameter, or of its gradient, to the stage ``other``, or receives."""
        slot, meshes, own = parameter.slot, self.stages.meshes.meshes, self.stages.stage
        here, there = (Layout(self._placed(parameter, stage), meshes[stage]) for stage in (own, other))
        return Crossing.of(slot.shape, slot.dtype, here, there, self.stages.index, sends=sends)

    def _placed(self, parameter: StagedParameter, stage: int) -> Placements:
        """How a stage has the parameter: all of its chunks alike."""
        return parameter.placed(next(chunk for chunk in parameter.chunks if self._stage(chunk) == stage))
