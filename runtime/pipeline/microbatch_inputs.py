"""The inputs of a rank's chunks in one step: microbatches of inputs, parameters, buffers, and random state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanMismatchError
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import take_local
from autopar.ir.program import Program, TensorSlot
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.executor import runner
from autopar.runtime.inputs.rank_local import whole

from .chunk_executable import ChunkExecutable

Values = Mapping[str, torch.Tensor]
# The element of a random state that says which microbatch draws (:mod:`autopar.ops.random`).
PIECE = 3


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step. ``values``: whole inputs by name, including results of the prelude; ``working[chunk]``:
    parameters by path; ``state``: the state that the step's random numbers are a function of; ``inside``: groups of the
    mesh inside the stage; ``caches``: this rank's part of each cache, by name and microbatch."""

    program: PipelineProgram
    module: nn.Module
    inside: MeshGroups
    values: Values
    working: Mapping[int, Values]
    state: torch.Tensor
    caches: Mapping[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def of(self, executable: ChunkExecutable, microbatch: int, buffers: Values | None = None) -> list[torch.Tensor]:
        """The placeholders of a chunk's forward for one microbatch. ``buffers``: those that are not read from the
        module, whole, by name."""
        return [self._local(slot, executable, microbatch, buffers or {}) for slot in executable.program.placeholders]

    def _local(self, slot: TensorSlot, executable: ChunkExecutable, microbatch: int, buffers: Values) -> torch.Tensor:
        match slot.kind:
            case "param":
                return self.working[executable.program.chunk][slot.target]
            case "input":
                own = self._own(slot, self._piece(slot.target, microbatch))
                return own.to(self.inside.device, non_blocking=True).contiguous()
            case "buffer":
                found = buffers.get(slot.target)
                return self._own(slot, self.module.get_buffer(slot.target) if found is None else found)
            case "cache":
                return self.caches[slot.target, microbatch]
            case "constant":
                return executable.constants[slot.target]
            case "random":
                return state_of_piece(self.state, microbatch)
        raise PlanMismatchError(f"a chunk takes a placeholder of kind {slot.kind!r} ({slot.target}), which no step has")

    def _own(self, slot: TensorSlot, whole: torch.Tensor) -> torch.Tensor:
        return take_local(whole, slot.placements, self.inside.shape, self.inside.coordinate)

    def _piece(self, name: str, microbatch: int) -> torch.Tensor:
        whole, dim = self.values[name], self.program.inputs[name]
        if dim is None:
            return whole
        size = whole.shape[dim] // self.program.microbatches
        return whole.narrow(dim, microbatch * size, size)


def state_of_piece(state: torch.Tensor, piece: int) -> torch.Tensor:
    """The random state of one microbatch of a step with random state ``state``."""
    own = state.clone()
    own[PIECE] = piece
    return own


def input_shapes(program: PipelineProgram) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the inputs that this rank's chunks read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in (slot for chunk in program.chunks.values() for slot in chunk.placeholders if slot.kind == "input"):
        sizes, dim = list(slot.shape), program.inputs[slot.target]
        if dim is not None:
            sizes[dim] *= program.microbatches
        shapes[slot.target] = tuple(sizes)
    return shapes


def whole_input(name: str, value: torch.Tensor, shape: tuple[int, ...] | None, groups: MeshGroups) -> torch.Tensor:
    """An input as a plain tensor, gathered if it is a DTensor. Raises :class:`PlanMismatchError` if its shape is not
    the ``shape`` compiled for."""
    if shape is not None and tuple(value.shape) != shape:
        raise PlanMismatchError(
            f"the input {name} has shape {list(value.shape)}, but the program was compiled for {list(shape)}"
        )
    return whole(value, groups) if isinstance(value, DTensor) else value.detach()


class Prelude:
    """Runs the part of a step that is computed once, on the whole batch and on every rank."""

    def __init__(self, program: Program, groups: MeshGroups) -> None:
        self.program = program
        self.device = groups.device
        self._run = runner(program.forward, groups, "every rank, before the microbatches")
        self._constants = {name: value.to(groups.device) for name, value in program.constants.items()}

    def run(self, values: Values, module: nn.Module, state: torch.Tensor) -> dict[str, torch.Tensor]:
        """The prelude's results by name, from the whole inputs ``values``."""
        inputs = [self._input(slot, values, module, state) for slot in self.program.placeholders]
        outputs: Sequence[torch.Tensor] = self._run(inputs)
        return {slot.target: value for slot, value in zip(self.program.results, outputs, strict=False)}

    def _input(self, slot: TensorSlot, values: Values, module: nn.Module, state: torch.Tensor) -> torch.Tensor:
        match slot.kind:
            case "input":
                return values[slot.target].to(self.device, non_blocking=True)
            case "buffer":
                return module.get_buffer(slot.target)
            case "constant":
                return self._constants[slot.target]
            case "random":
                return state
        raise PlanMismatchError(f"the prelude takes a placeholder of kind {slot.kind!r} ({slot.target})")
