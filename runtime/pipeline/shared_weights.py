"""Parameters that chunks on several stages use: one stage owns each, the others borrow it for a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.ir.pipeline_program import PipelineProgram, StagedParameter
from autopar.ir.placements import local_shape

from .point_to_point import Arrival, Messenger
from .stage_mesh import StageGroups


class SharedWeights:
    """Sends shared parameters and sums their gradients. Every rank iterates over parameters and stages in the same
    order, so that messages match."""

    def __init__(self, program: PipelineProgram, stages: StageGroups) -> None:
        self.program, self.stages = program, stages
        self.shared = [p for p in program.parameters if len(p.chunks) > 1]

    def spread(self, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Stored local tensors by path, with those of other stages' parameters received from their owners."""
        messenger, arriving = Messenger(self.stages), {}
        for parameter in self.shared:
            path, owner = parameter.slot.target, self._stage(parameter.owner)
            for stage in self._stages(parameter, parameter.chunks):
                if owner == self.stages.stage:
                    messenger.send([stored[path]], stage)
                elif stage == self.stages.stage:
                    arriving[path] = messenger.receive([self._room(parameter)], owner)
        spread = stored | {path: arrival.wait()[0] for path, arrival in arriving.items()}
        messenger.finish()
        return spread

    def add_up(self, parts: Mapping[tuple[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums the gradients ``parts`` (by chunk and path) of all stages. Returns them by path, on the owner's
        stage."""
        totals: dict[str, torch.Tensor] = {}
        for (_, path), part in parts.items():
            totals[path] = totals[path].add_(part) if path in totals else part
        messenger, arriving = Messenger(self.stages), list[tuple[str, Arrival]]()
        for parameter in self.shared:
            path, owner = parameter.slot.target, self._stage(parameter.owner)
            for stage in self._stages(parameter, parameter.gradients):
                if stage == self.stages.stage:
                    messenger.send([totals[path]], owner)
                elif owner == self.stages.stage:
                    arriving.append((path, messenger.receive([self._room(parameter)], stage)))
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

    def _room(self, parameter: StagedParameter) -> torch.Tensor:
        own, slot = self.stages.own, parameter.slot
        return torch.empty(
            local_shape(slot.shape, slot.placements, own.shape, own.coordinate), dtype=slot.dtype, device=own.device
        )
