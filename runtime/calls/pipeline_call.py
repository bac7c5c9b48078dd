"""One compiled step in microbatches, bound to a module's tensors: the counterpart of :class:`~.call.Call`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.pipeline_program import PipelineProgram, StagedParameter, StagedResult
from autopar.ir.placements import PARTIAL_SUM, take_local
from autopar.ir.program import Section
from autopar.ops.index_range import take_out_of_range
from autopar.progress import shown
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.pipeline.action_loop import PipelineRun
from autopar.runtime.pipeline.chunk_executable import ChunkExecutable
from autopar.runtime.pipeline.microbatch_inputs import Prelude, StepInputs, input_shapes, whole_input
from autopar.runtime.pipeline.point_to_point import Messenger
from autopar.runtime.pipeline.shared_weights import SharedWeights
from autopar.runtime.pipeline.stage_gradient import StageGradient
from autopar.runtime.pipeline.stage_mesh import stage_meshes
from autopar.runtime.pipeline.timeline_recorder import Recorder
from autopar.runtime.state.parameters import laid_out_like, local_of
from autopar.runtime.state.weights import accumulate, gradient_like
from autopar.schedule.timeline import Timeline

from .resident import cache_slots, keep_piece, own_piece, resident_of
from .signature import CompiledCall

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Stepped:
    """What a step in microbatches computed: whole ``outputs`` by name, on every rank; local ``gradients`` by path, of
    the parameters of this stage, multiplied by ``factor``, that of fp16; the ``state`` of random numbers it used."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    factor: float
    state: torch.Tensor

    def times(self, number: torch.Tensor | float) -> Stepped:
        """This with other gradients: ``number`` times these."""
        return replace(self, gradients={path: value * number for path, value in self.gradients.items()})


class PipelineCall(CompiledCall):
    """See the module docstring. ``groups`` are of the mesh of all devices."""

    @shown("compiling the program")
    def _bind_program(self, program: PipelineProgram) -> None:
        self.program = program
        self.stages = stage_meshes(self.groups, program.meshes)
        self.chunks = {
            index: ChunkExecutable(chunk, self.stages.own, self._mesh_of, self.compilation)
            for index, chunk in program.chunks.items()
        }
        self.weights.settle([(p.slot, self.stages.place[program.stage_of(p.owner)]) for p in program.parameters])
        self.parameters = self.weights.parameters([p.slot for p in program.parameters])
        self.results = {r.slot.target: r for r in program.results if r.slot.kind == "output"}
        self.timelines: list[Timeline] | None = None
        self._shared = SharedWeights(program, self.stages)
        self._tangents = {index: self._ones(chunk) for index, chunk in self.chunks.items()}
        self._shapes = input_shapes(program)
        self._cached = cache_slots([slot for chunk in program.chunks.values() for slot in chunk.placeholders])
        self._prelude = None if program.prelude is None else Prelude(program.prelude, self.groups)

    def _mesh_of(self, chunk: int) -> tuple[int, ...]:
        return self.program.meshes.meshes[self.program.stage_of(chunk)]

    def sections(self) -> Iterator[Section]:
        if self._prelude is not None:
            yield self._prelude.program.forward
        for chunk in self.chunks.values():
            yield from chunk.program.sections

    def step(self, leaves: Sequence[Any], scale: float = 1.0) -> torch.Tensor:
        """Runs forward and backward of all microbatches, and adds gradients of the loss times ``scale`` to ``.grad`` of
        the parameters. Returns the loss, detached and unscaled, on every rank."""
        name = self.loss_name()
        if not self.program.schedule.training:
            raise AutoparError("the program only runs forward: step() needs one compiled for training")
        stepped = self.differentiate(leaves, scale=scale)
        self.add(stepped)
        return stepped.outputs[name].detach()

    def differentiate(self, leaves: Sequence[Any], state: torch.Tensor | None = None, *, scale: float = 1.0) -> Stepped:
        """Runs forward and backward of all microbatches; gradients are those of the loss times ``scale``. ``state``: of
        random numbers, to repeat a run. Updates buffers. Collective."""
        state = self._draw_state() if state is None else state
        factor = 1.0 if self.loss_scale is None else self.loss_scale.scale
        run = self._run(leaves, scale * factor, state)
        totals = self._shared.add_up(self._gradients(run))
        outputs = self._finish(run)
        self.check_indices(leaves)
        return Stepped(outputs, totals, factor, state)

    def add(self, stepped: Stepped) -> None:
        """Adds the gradients to ``.grad`` of the parameters, unless they overflow. Collective under fp16."""
        with torch.no_grad():
            totals, everything = stepped.gradients, self.weights.module.parameters()
            if self.loss_scale is not None:
                if self.loss_scale.scale != stepped.factor:  # Another call of the same step overflowed in between.
                    totals = stepped.times(self.loss_scale.scale / stepped.factor).gradients
                if not self.loss_scale.settle(totals.values(), everything, self.groups):
                    return
            for owned, parameter in zip(self.program.parameters, self.parameters, strict=True):
                if owned.gradients:
                    accumulate(parameter, self._own_gradient(owned, parameter, totals), self._gradient_like)

    def run(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Runs forward only. Returns whole outputs by name, on every rank. Updates buffers."""
        run = self._run(leaves, 1.0, self._draw_state())
        if self._cached:
            with torch.no_grad():
                self._keep_caches(run, leaves)
        outputs = self._finish(run)
        self.check_indices(leaves)
        return outputs

    def _run(self, leaves: Sequence[Any], scale: float, state: torch.Tensor) -> PipelineRun:
        take_out_of_range()  # Clears what an earlier call noted before it failed with another error.
        with torch.no_grad():
            step_inputs = self._inputs(leaves, state)

            def inputs(chunk: int, microbatch: int) -> list[torch.Tensor]:
                return step_inputs.of(self.chunks[chunk], microbatch, self._left_by(run, chunk, microbatch - 1))

            messenger = Messenger(self.stages)
            recorder = None if self.timelines is None else Recorder(self.stages)
            run = PipelineRun(self.program, self.chunks, messenger, inputs, self._scaled_tangents(scale), recorder)
            if recorder is not None:
                recorder.start()
            run.run()
            if recorder is not None and self.timelines is not None:
                self.timelines.append(recorder.timeline(self.program.schedule.name))
        return run

    def _left_by(self, run: PipelineRun, chunk: int, microbatch: int) -> Values:
        """The buffers as a microbatch left them in a chunk, if the next one is to begin with them."""
        if microbatch < 0 or not self.program.updates_in_turn:
            return {}
        slots = self.chunks[chunk].program.results
        values = zip(slots, run.results[chunk, microbatch], strict=True)
        return {slot.target: value for slot, value in values if slot.kind == "mutation"}

    def _working(self) -> dict[int, dict[str, torch.Tensor]]:
        """The working parameters of each chunk, by path."""
        stored = (local_of(parameter) for parameter in self.parameters)
        own = dict(zip((p.slot.target for p in self.program.parameters), stored, strict=True))
        by_path, working = self._shared.spread(own), {}
        for index, chunk in self.chunks.items():
            paths = [slot.target for slot in chunk.program.parameters]
            working[index] = dict(zip(paths, chunk.refresh([by_path[path] for path in paths]), strict=True))
        return working

    def _inputs(self, leaves: Sequence[Any], state: torch.Tensor) -> StepInputs:
        """The inputs of this step. Collective, since it prepares parameters."""
        values = {
            name: whole_input(name, leaves[i], self._shapes.get(name), self.groups)
            for name, i in self._leaf_index.items()
            if resident_of(leaves[i]) is None
        }
        module = self.weights.module
        if self._prelude is not None:
            values |= self._prelude.run(values, module, state)
        return StepInputs(self.program, module, self.stages.own, values, self._working(), state, self._caches(leaves))

    def _caches(self, leaves: Sequence[Any]) -> dict[tuple[str, int], torch.Tensor]:
        """This rank's part of the caches that its chunks take, by name and microbatch."""
        count = self.program.microbatches
        return {
            (name, k): own_piece(slot, leaves[self._leaf_index[name]], k, count)
            for name, slot in self._cached.items()
            for k in range(count)
        }

    def _keep_caches(self, run: PipelineRun, leaves: Sequence[Any]) -> None:
        own = self._caches(leaves)
        for (chunk, microbatch), values in run.results.items():
            for slot, value in zip(self.chunks[chunk].program.results, values, strict=True):
                if slot.target in self._cached:
                    keep_piece(own[slot.target, microbatch], value)

    def _ones(self, chunk: ChunkExecutable) -> list[torch.Tensor]:
        """The local tangents of the loss."""
        tangents = []
        for slot in chunk.program.tangents:
            own = take_local(
                torch.ones(slot.shape, dtype=slot.dtype, device=self.groups.device),
                slot.placements,
                self.stages.own.shape,
                self.stages.own.coordinate,
            )
            axes = tuple(a for a, p in enumerate(slot.placements) if p == PARTIAL_SUM)
            tangents.append((Collectives(self.stages.own).partial(own, axes) if axes else own).contiguous())
        return tangents

    def _scaled_tangents(self, scale: float) -> Mapping[int, list[torch.Tensor]]:
        if scale == 1.0:
            return self._tangents
        return {index: [tangent * scale for tangent in tangents] for index, tangents in self._tangents.items()}

    def _gradients(self, run: PipelineRun) -> dict[tuple[int, str], torch.Tensor]:
        """The part of each gradient that each chunk of this rank has."""
        return {
            (index, slot.target): value
            for index, values in run.gradients.items()
            for slot, value in zip(self.chunks[index].program.gradients, values, strict=True)
        }

    def _own_gradient(self, owned: StagedParameter, parameter: nn.Parameter, totals: Values) -> torch.Tensor:
        """The whole gradient of a parameter of this stage; an empty one for other stages' parameters."""
        if self.program.stage_of(owned.owner) == self.program.stage:
            return laid_out_like(totals[owned.slot.target], parameter)
        local = local_of(parameter)
        return local.new_empty(local.shape)

    def _gradient_like(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        if self.stages.count == 1:
            return gradient_like(parameter, local)
        return StageGradient.like(parameter, local, self.groups)

    def _finish(self, run: PipelineRun) -> dict[str, torch.Tensor]:
        """The outputs of the step by name, and new values of buffers, on every rank."""
        outputs: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for result in self.program.results:
                whole = self._result(run, result)
                if result.slot.kind == "mutation":
                    self.weights.module.get_buffer(result.slot.target).copy_(whole)
                else:
                    outputs[result.slot.target] = whole
        return outputs

    def _result(self, run: PipelineRun, result: StagedResult) -> torch.Tensor:
        """A result of the step, broadcast from the stage that has it."""
        stage = self.program.stage_of(result.chunk)
        if stage == self.program.stage:
            slots = self.chunks[result.chunk].program.results
            at = next(i for i, s in enumerate(slots) if (s.kind, s.target) == (result.slot.kind, result.slot.target))
            parts = [run.results[result.chunk, k][at] for k in range(self.program.microbatches)]
            return self.stages.everywhere(combined(parts, result), stage)
        shape = result.shape(self.program.microbatches)
        return self.stages.everywhere(torch.empty(shape, dtype=result.slot.dtype, device=self.groups.device), stage)


def combined(parts: list[torch.Tensor], result: StagedResult) -> torch.Tensor:
    """Combines the results of all microbatches into that of the step; contiguous."""
    if result.dim is not None:
        return torch.cat(parts, result.dim)
    if result.combine == "sum":
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0].contiguous()
    return parts[-1 if result.combine == "last" else 0].contiguous()
