"""One compiled step in microbatches, bound to a module's tensors: the counterpart of :class:`~.call.Call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, PlanMismatchError
from autopar.pipeline import PipelineProgram, StagedParameter, StagedResult
from autopar.program import TensorSlot
from autopar.spec import PARTIAL_SUM, take_local

from .calling import Calling
from .chunk_executable import ChunkExecutable
from .collectives import Collectives
from .compiled import Compiled
from .executor import own_constants, runner
from .groups import MeshGroups
from .messages import Messenger
from .parameters import local_of
from .pipeline_run import PipelineRun, Record
from .shared_weights import SharedWeights
from .stage_mesh import stage_meshes
from .weights import Weights, accumulate

Values = Mapping[str, torch.Tensor]


class PipelineCall(Calling):
    """See the module docstring. ``groups`` are of the mesh (stages, \\*inside a stage). Making one is collective.
    ``draw_state`` as for a :class:`~.call.Call`."""

    def __init__(
        self, compiled: Compiled, weights: Weights, groups: MeshGroups, draw_state: Callable[[], torch.Tensor]
    ) -> None:
        super().__init__(compiled.signature)
        assert isinstance(compiled.program, PipelineProgram)
        self.program = program = compiled.program
        self.groups, self.weights, self._draw_state = groups, weights, draw_state
        self.stages = stage_meshes(groups)
        self.chunks = {index: ChunkExecutable(chunk, self.stages.own) for index, chunk in program.chunks.items()}
        weights.settle([(p.slot, self.stages.place[program.stage_of(p.owner)]) for p in program.parameters])
        self.parameters = weights.parameters([p.slot for p in program.parameters])
        self.results = {r.slot.target: r for r in program.results if r.slot.kind == "output"}
        self.record: Record | None = None
        self._shared = SharedWeights(program, self.stages)
        self._leaf_index = {name: i for i, name in enumerate(self.signature.input_names) if name is not None}
        self._refresh_key = "".join(str(chunk.program.refresh) for chunk in self.chunks.values())
        self._tangents = {index: self._ones(chunk) for index, chunk in self.chunks.items()}
        if program.prelude is not None:
            self._prelude = runner(program.prelude.forward, self.stages.own, "every rank, before the step")

    def step(self, leaves: Sequence[Any]) -> torch.Tensor:
        """All microbatches forward and backward, gradients added to ``.grad`` of the parameters; the detached loss, on
        every rank."""
        name = self.loss_name()
        if not self.program.schedule.training:
            raise AutoparError("the program only goes forward: step() needs one compiled for training")
        run = self._run(leaves)
        totals = self._shared.add_up(self._gradients(run))
        outputs = self._finish(run)
        with torch.no_grad():
            for owned, parameter in zip(self.program.parameters, self.parameters, strict=True):
                if owned.gradients:
                    accumulate(parameter, self._own_gradient(owned, parameter, totals))
        return outputs[name].detach()

    def run(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Forward alone: outputs by name, whole on every rank. Buffers are brought up to date."""
        return self._finish(self._run(leaves))

    def _run(self, leaves: Sequence[Any]) -> PipelineRun:
        with torch.no_grad():
            values = self._values(leaves)
            working = self._working()

            def inputs(chunk: int, microbatch: int) -> list[torch.Tensor]:
                return self._bind(chunk, microbatch, values, working[chunk])

            messenger = Messenger(self.stages)
            run = PipelineRun(
                self.program, self.chunks, messenger, inputs, self._tangents, self.groups.device, self.record
            )
            run.run()
        return run

    def _working(self) -> dict[int, dict[str, torch.Tensor]]:
        """The working parameters of each chunk, by path."""
        slots = {index: [slot.target for slot in chunk.program.parameters] for index, chunk in self.chunks.items()}

        def refresh(stored: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
            known = self._shared.spread(
                dict(zip((p.slot.target for p in self.program.parameters), stored, strict=True))
            )
            made = {index: self.chunks[index].refresh([known[path] for path in slots[index]]) for index in slots}
            return {index: dict(zip(slots[index], values, strict=True)) for index, values in made.items()}

        return self.weights.working(self._refresh_key, refresh, self.parameters)

    def _values(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """All inputs, whole, with the results of the prelude."""
        values = {name: self._whole(name, leaves[index]) for name, index in self._leaf_index.items()}
        prelude = self.program.prelude
        if prelude is None:
            return values
        constants = own_constants(prelude.placeholders, prelude.constants, self.groups)
        given = [self._given(slot, values, constants) for slot in prelude.placeholders]
        made = self._prelude(given)[: len(prelude.results)]
        return values | {slot.target: value for slot, value in zip(prelude.results, made, strict=True)}

    def _whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        whole = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
        wanted = self._input_shapes().get(name)
        if wanted is not None and tuple(whole.shape) != wanted:
            raise PlanMismatchError(
                f"the input {name} has shape {list(whole.shape)}, but the program was compiled for {list(wanted)}"
            )
        return whole

    def _input_shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shapes of the inputs that this rank's chunks read."""
        found: dict[str, tuple[int, ...]] = {}
        for chunk in self.program.chunks.values():
            for slot in chunk.placeholders:
                if slot.kind == "input":
                    sizes, dim = list(slot.shape), self.program.inputs[slot.target]
                    if dim is not None:
                        sizes[dim] *= self.program.microbatches
                    found[slot.target] = tuple(sizes)
        return found

    def _bind(self, chunk: int, microbatch: int, values: Values, working: Values) -> list[torch.Tensor]:
        """The placeholders of one chunk for one microbatch."""
        executable = self.chunks[chunk]
        found = []
        for slot in executable.program.placeholders:
            if slot.kind == "param":
                found.append(working[slot.target])
            elif slot.kind == "input":
                found.append(self._piece(slot, values[slot.target], microbatch))
            else:
                found.append(self._own(slot, self._given(slot, values, executable.constants)))
        return found

    def _given(self, slot: TensorSlot, values: Values, constants: Values) -> torch.Tensor:
        """An input, buffer or constant."""
        match slot.kind:
            case "input":
                return values[slot.target].to(self.groups.device, non_blocking=True)
            case "buffer":
                return self.weights.module.get_buffer(slot.target)
            case "constant":
                return constants[slot.target]
        raise PlanMismatchError(
            f"the program takes a placeholder of kind {slot.kind!r} ({slot.target}) that a step has not"
        )

    def _own(self, slot: TensorSlot, whole: torch.Tensor) -> torch.Tensor:
        if slot.kind == "constant":
            return whole
        return take_local(whole, slot.placements, self.stages.own.shape, self.stages.own.coordinate)

    def _piece(self, slot: TensorSlot, whole: torch.Tensor, microbatch: int) -> torch.Tensor:
        """This rank's part of an input for one microbatch."""
        dim = self.program.inputs[slot.target]
        if dim is not None:
            size = whole.shape[dim] // self.program.microbatches
            whole = whole.narrow(dim, microbatch * size, size)
        return self._own(slot, whole).to(self.groups.device, non_blocking=True).contiguous()

    def _ones(self, chunk: ChunkExecutable) -> list[torch.Tensor]:
        """The tangents of the loss, as they lie."""
        found = []
        for slot in chunk.program.tangents:
            own = take_local(
                torch.ones(slot.shape, dtype=slot.dtype, device=self.groups.device),
                slot.placements,
                self.stages.own.shape,
                self.stages.own.coordinate,
            )
            axes = tuple(a for a, p in enumerate(slot.placements) if p == PARTIAL_SUM)
            found.append((Collectives(self.stages.own).partial(own, axes) if axes else own).contiguous())
        return found

    def _gradients(self, run: PipelineRun) -> dict[tuple[int, str], torch.Tensor]:
        """What each chunk of this rank has of each gradient."""
        return {
            (index, slot.target): value
            for index, values in run.gradients.items()
            for slot, value in zip(self.chunks[index].program.gradients, values, strict=True)
        }

    def _own_gradient(self, owned: StagedParameter, parameter: nn.Parameter, totals: Values) -> torch.Tensor:
        """The total of a parameter of this stage; of others, nothing."""
        if self.program.stage_of(owned.owner) == self.program.stage:
            return totals[owned.slot.target]
        local = local_of(parameter)
        return local.new_empty(local.shape)

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
        """A result of the step, from the stage that has it."""
        stage = self.program.stage_of(result.chunk)
        if stage == self.program.stage:
            slots = self.chunks[result.chunk].program.results
            at = next(i for i, s in enumerate(slots) if (s.kind, s.target) == (result.slot.kind, result.slot.target))
            parts = [run.results[result.chunk, k][at] for k in range(self.program.microbatches)]
            return self.stages.everywhere(combined(parts, result), stage)
        shape = result.shape(self.program.microbatches)
        return self.stages.everywhere(torch.empty(shape, dtype=result.slot.dtype, device=self.groups.device), stage)


def combined(parts: list[torch.Tensor], result: StagedResult) -> torch.Tensor:
    """The step's result of those of its microbatches; contiguous."""
    if result.dim is not None:
        return torch.cat(parts, result.dim)
    if result.combine == "sum":
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0].contiguous()
    return parts[0].contiguous()
