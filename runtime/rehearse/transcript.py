"""What one rank sends and receives in a training step, in order, without other ranks.

It runs the same code as a step does, on meta tensors, as :mod:`.rehearsal` does, and also sends the weights that stages
share. So a transcript is what the rank would start, and transcripts of several ranks can be compared
(:mod:`autopar.verification.unfolding`). The broadcast of a step's results is not part of it: all ranks do that alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import index_of
from autopar.ir.program import Program, TensorSlot
from autopar.ir.stage_meshes import StageMeshes
from autopar.ops.attention_kernels import kernels_of
from autopar.runtime.comm.groups import AxisGroup
from autopar.runtime.execute.executor import own_constants, runner
from autopar.runtime.execute.section_code import Run
from autopar.runtime.pipeline.action_loop import PipelineRun
from autopar.runtime.pipeline.chunk_executable import ChunkExecutable
from autopar.runtime.pipeline.point_to_point import Arrival, Crossing
from autopar.runtime.pipeline.shared_weights import SharedWeights
from autopar.schedule.actions import Action

from .rehearsal import META, ImaginedGroups, NoPeers, empty_slot, forward_inputs, stored_parameters, without_data


@dataclass(frozen=True, slots=True)
class Started:
    """A collective among the ranks of ``group``, in its order: its operand has ``shape`` and ``dtype``. ``during`` the
    action of the schedule that the rank began last. Of a block of experts whose rows travel the shape is that of the
    device's tokens; how many rows travel is known in the step."""

    kind: str
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    group: tuple[int, ...]
    during: str


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor, or a piece of one, that is sent to rank ``peer``. ``what``: the message, as both its ends call it."""

    peer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Received:
    """The same that is received from ``peer``."""

    peer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    what: str


Event = Started | Sent | Received


@dataclass
class _Notes:
    """Writes down what a rank starts. ``first``: the rank of the first device of its stage, on ``mesh``; ``during`` and
    ``what``: what it does now, and the message that it sends or receives."""

    first: int
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    events: list[Event] = field(default_factory=list)
    during: str = ""
    what: str = ""
    _members: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def started(self, kind: str, op: str, operand: torch.Tensor, group: AxisGroup) -> None:
        members = self._ranks(group.axes)
        self.events.append(Started(kind, op, operand.dtype, tuple(operand.shape), members, self.during))

    def once(self, run: Run) -> Run:
        """Runs a section once for tensors of the same form, on which alone it depends where they have no data:
        microbatches repeat what the first ones start."""
        made: dict[tuple[Any, ...], tuple[list[Started], list[Any]]] = {}

        def again(inputs: list[Any]) -> list[Any]:
            if not all(isinstance(value, torch.Tensor) for value in inputs):
                return run(inputs)
            form = tuple((value.dtype, value.shape, value.stride()) for value in inputs)
            if form not in made:
                before = len(self.events)
                outputs = run(inputs)
                made[form] = [event for event in self.events[before:] if isinstance(event, Started)], outputs
            else:
                inputs.clear()
                self.events += (replace(event, during=self.during) for event in made[form][0])
            return list(made[form][1])

        return again

    def _ranks(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        if axes not in self._members:
            spans = [range(n) if a in axes else [self.coordinate[a]] for a, n in enumerate(self.mesh)]
            self._members[axes] = tuple(self.first + index_of(place, self.mesh) for place in itertools.product(*spans))
        return self._members[axes]


class _Peers(NoPeers):
    """A messenger that writes down what it would send and receive, piece by piece."""

    def __init__(self, meshes: StageMeshes, notes: _Notes) -> None:
        super().__init__(META)
        self._meshes, self._notes = meshes, notes

    def send(self, tensors: Sequence[torch.Tensor], crossings: Sequence[Crossing], stage: int) -> None:
        super().send(tensors, crossings, stage)
        self._note(Sent, tensors, crossings, stage)

    def receive(self, crossings: Sequence[Crossing], stage: int) -> Arrival:
        arrival = super().receive(crossings, stage)
        self._note(Received, arrival.tensors, crossings, stage)
        return arrival

    def _note(
        self, kind: Callable[..., Event], tensors: Iterable[torch.Tensor], crossings: Iterable[Crossing], stage: int
    ) -> None:
        first = self._meshes.ranks(stage).start
        self._notes.events += (
            kind(first + piece.device, tensor.dtype, tuple(piece.of(tensor).shape), self._notes.what)
            for tensor, crossing in zip(tensors, crossings, strict=True)
            for piece in crossing.pieces
        )


@dataclass
class _Noted(PipelineRun):
    """A run whose ``notes`` say which action is in progress."""

    notes: _Notes | None = None

    def _do(self, action: Action) -> None:
        assert self.notes is not None
        self.notes.during = str(action)
        self.notes.what = str(action.message) if action.sends or action.receives else ""
        super()._do(action)


def transcript(program: Program | PipelineProgram) -> tuple[Event, ...]:
    """What the rank of ``program`` starts in a training step. Raises the error of an operation that does not support
    tensors without data."""
    with kernels_of("cuda"), torch.no_grad():
        if isinstance(program, Program):
            notes = _Notes(0, program.mesh, program.coordinate)
            _run_whole(without_data(program), notes)
        else:
            inside = program.meshes.meshes[program.stage]
            notes = _Notes(program.meshes.ranks(program.stage).start, inside, program.coordinate[1:])
            _Stages(program, notes).step()
    return tuple(notes.events)


def _groups(notes: _Notes) -> ImaginedGroups:
    return ImaginedGroups(notes.mesh, notes.coordinate, "nccl", listener=notes)


def _run_whole(program: Program, notes: _Notes) -> None:
    groups = _groups(notes)
    refresh, forward, backward = (runner(section, groups, "a transcript") for section in program.sections)
    working = refresh(stored_parameters(program, program.parameters, groups))
    by_path = dict(zip((slot.target for slot in program.parameters), working, strict=True))
    constants = own_constants(program.placeholders, program.constants, groups)
    values = forward(forward_inputs(program.placeholders, by_path, constants, lambda slot: empty_slot(slot, groups)))
    saved = values[len(program.results) :]
    if program.gradients:
        backward([*saved, *(empty_slot(slot, groups) for slot in program.tangents)])


class _Stages:
    """The step of a rank of a pipeline, as :class:`autopar.runtime.calls.pipeline_call.PipelineCall` runs it. It is
    its own seat."""

    def __init__(self, program: PipelineProgram, notes: _Notes) -> None:
        self.program, self.meshes, self.stage = program, program.meshes, program.stage
        self.index = index_of(notes.coordinate, notes.mesh)
        self.groups, self._notes = _groups(notes), notes
        self.chunks = {
            index: ChunkExecutable(without_data(chunk), self.groups, self._mesh_of, around=notes.once)
            for index, chunk in program.chunks.items()
        }
        self._shared = SharedWeights(program, self, self._messenger)  # type: ignore[arg-type]

    def _mesh_of(self, chunk: int) -> tuple[int, ...]:
        return self.meshes.meshes[self.program.stage_of(chunk)]

    def _messenger(self, _seat: Any = None) -> _Peers:
        return _Peers(self.meshes, self._notes)

    def step(self) -> None:
        working = self._working()
        caches = [s for c in self.chunks.values() for s in c.program.placeholders if s.kind == "cache"]
        assert not caches, "a training step has no caches"

        def inputs(index: int, _microbatch: int) -> list[torch.Tensor]:
            chunk = self.chunks[index]
            return forward_inputs(chunk.program.placeholders, working[index], chunk.constants, self._empty)

        tangents = {i: [self._empty(slot) for slot in chunk.program.tangents] for i, chunk in self.chunks.items()}
        messenger, notes = self._messenger(), self._notes
        run = _Noted(self.program, self.chunks, messenger, inputs, tangents, notes=notes)  # type: ignore[arg-type]
        run.run()
        notes.during = notes.what = "gradients of weights that stages share"
        self._shared.add_up(
            {
                (index, slot.target): value
                for index, values in run.gradients.items()
                for slot, value in zip(self.chunks[index].program.gradients, values, strict=True)
            }
        )

    def _empty(self, slot: TensorSlot) -> torch.Tensor:
        return empty_slot(slot, self.groups)

    def _working(self) -> dict[int, dict[str, torch.Tensor]]:
        """The working parameters of each chunk, by path."""
        stored: dict[str, Any] = {}
        for parameter in self.program.parameters:
            if self.program.stage_of(parameter.owner) == self.stage:
                owner = self.chunks[parameter.owner].program
                (stored[parameter.slot.target],) = stored_parameters(owner, [parameter.slot], self.groups)
        self._notes.during = self._notes.what = "weights that stages share"
        by_path, working = self._shared.spread(stored), {}
        for index, chunk in self.chunks.items():
            paths = [slot.target for slot in chunk.program.parameters]
            working[index] = dict(zip(paths, chunk.refresh([by_path[path] for path in paths]), strict=True))
        return working
