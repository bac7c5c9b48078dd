"""A step played through on meta tensors, to know its memory before there is any.

It runs the very code that a step runs (sections, collectives with their buffers, the actions of a schedule), on
tensors without data and over groups without anybody in them, and counts what is alive. So the figure is that of the
step, for the rank whose program it is; what kernels allocate for themselves is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from autopar.ir.chunk_program import ChunkProgram
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import local_shape
from autopar.ir.program import Program, TensorSlot
from autopar.runtime.comm.groups import AxisGroup, MeshGroups
from autopar.runtime.execute.executor import own_constants, runner
from autopar.runtime.pipeline.action_loop import PipelineRun
from autopar.runtime.pipeline.chunk_executable import ChunkExecutable
from autopar.runtime.pipeline.point_to_point import IN_FLIGHT, Arrival
from autopar.torch_internals.tensors import storage_key

from .storage_meter import StorageMeter

META = torch.device("meta")
Tensors = list[torch.Tensor]
AnyProgram = TypeVar("AnyProgram", Program, ChunkProgram)


@dataclass(frozen=True)
class Footprint:
    """Bytes alive on a rank when most is: the program's ``weights`` (stored and working), ``gradients``,
    ``activations`` (saved for backward), ``inputs``, and everything else, which is ``temporary``. ``stored`` and
    ``accumulated``: bytes of stored parameters and of all gradients after the step. ``held``: (kind, name) of each
    gradient (its parameter) and activation (its value) that is among them."""

    weights: int
    gradients: int
    activations: int
    inputs: int
    temporary: int
    stored: int
    accumulated: int
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.activations + self.inputs + self.temporary


class ImaginedGroups(MeshGroups):
    """The groups of the rank at ``coordinate`` of a mesh of ``shape`` on which nobody is; ``backend`` decides what
    buffers collectives make, on ``device``."""

    def __init__(
        self, shape: tuple[int, ...], coordinate: tuple[int, ...], backend: str, device: torch.device = META
    ) -> None:
        self.shape, self.coordinate = shape, coordinate
        self._backend, self._device = backend, device
        self._made: dict[tuple[int, ...], AxisGroup] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def _make(self, axes: tuple[int, ...]) -> AxisGroup:
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + self.coordinate[axis]
        return AxisGroup(None, math.prod(self.shape[a] for a in axes), index, self._device.type, self._backend, axes)


def rehearse(program: Program | PipelineProgram, backend: str = "nccl", device: torch.device = META) -> Footprint:
    """The footprint of one training step of ``program`` on ``device``, which is without data: meta, or any within
    ``FakeTensorMode``. Raises whatever an operation raises that has no form for such tensors."""
    if isinstance(program, Program):
        groups = ImaginedGroups(program.mesh, program.coordinate, backend, device)
        return _whole(_without_data(program), groups)
    groups = ImaginedGroups(program.mesh[1:], program.coordinate[1:], backend, device)
    chunks = {index: _without_data(chunk) for index, chunk in program.chunks.items()}
    return _staged(replace(program, chunks=chunks), groups)


def _without_data(program: AnyProgram) -> AnyProgram:
    """``program``, with constants that are on the meta device."""
    constants = {name: constant.to("meta") for name, constant in program.constants.items()}
    return replace(program, constants=constants)


def _empty(slot: TensorSlot, groups: MeshGroups) -> torch.Tensor:
    shape = local_shape(slot.shape, slot.placements, groups.shape, groups.coordinate)
    return torch.empty(shape, dtype=slot.dtype, device=groups.device)


def _given(
    slots: Iterable[TensorSlot],
    working: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    empty: Callable[[TensorSlot], torch.Tensor],
) -> Tensors:
    """What forward is given: working parameters and constants as they are, everything else ``empty``."""
    known = {"param": working, "constant": constants}
    return [known[slot.kind][slot.target] if slot.kind in known else empty(slot) for slot in slots]


def _whole(program: Program, groups: MeshGroups) -> Footprint:
    refresh, forward, backward = (
        runner(section, groups, "a rehearsal") for section in (program.refresh, program.forward, program.backward)
    )

    def empty(slot: TensorSlot) -> torch.Tensor:
        return _empty(slot, groups)

    stored, constants = (
        list(map(empty, program.parameters)),
        own_constants(program.placeholders, program.constants, groups),
    )
    with torch.no_grad(), StorageMeter() as meter:
        record = _Record(meter, stored)
        working = refresh(list(stored))
        record.add("weight", working, ())
        made = dict(zip((slot.target for slot in program.parameters), working, strict=True))
        given = _given(program.placeholders, made, constants, empty)
        record.add("input", given, ())
        values = forward(list(given))
        del working, made
        count = len(program.results)
        results, saved = values[:count], values[count:]
        del values
        record.add("activation", saved, program.backward.inputs)
        ones = list(map(empty, program.tangents))
        del given
        everything = [*saved, *ones]
        del saved
        gradients = backward(everything) if program.gradients else []
        record.add("gradient", gradients, tuple(slot.target for slot in program.gradients))
        found = record.footprint(gradients)
    del results
    return found


class _Record:
    """Which storage is what, each known by the first name it is given."""

    def __init__(self, meter: StorageMeter, stored: Sequence[torch.Tensor]) -> None:
        self.meter = meter
        self.known: dict[int, tuple[str, str, Any]] = {}
        self.stored = sum(t.untyped_storage().nbytes() for t in stored)
        self.add("weight", stored, ())

    def add(self, kind: str, tensors: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
        for position, tensor in enumerate(tensors):
            if tensor is None:
                continue
            self.meter.see(tensor)
            life = self.meter.life(tensor)
            if life is not None and id(life) not in self.known:
                self.known[id(life)] = (kind, names[position] if names else "", life)

    def footprint(self, gradients: Sequence[torch.Tensor | None]) -> Footprint:
        sums = dict.fromkeys(("weight", "gradient", "activation", "input"), 0)
        held: dict[tuple[str, str], int] = {}
        for kind, name, life in self.known.values():
            alive = self.meter.at_peak(life)
            sums[kind] += alive
            if alive and name:
                held[kind, name] = held.get((kind, name), 0) + alive
        rest = self.meter.peak - sum(sums.values())
        storages = {storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in gradients if t is not None}
        return Footprint(
            weights=sums["weight"],
            gradients=sums["gradient"],
            activations=sums["activation"],
            inputs=sums["input"],
            temporary=rest,
            stored=self.stored,
            accumulated=sum(storages.values()),
            held=held,
        )


class _Nobody:
    """Takes messages for other stages and keeps them as long as a messenger does."""

    def __init__(self) -> None:
        self._sent: dict[int, list[Tensors]] = {}

    def send(self, tensors: Sequence[torch.Tensor], stage: int) -> None:
        queue = self._sent.setdefault(stage, [])
        queue.append([tensor.contiguous() for tensor in tensors if tensor.numel()])
        del queue[:-IN_FLIGHT]

    def receive(self, tensors: Tensors, stage: int) -> Arrival:
        return Arrival(tensors)

    def finish(self) -> None:
        self._sent.clear()


def _staged(program: PipelineProgram, groups: MeshGroups) -> Footprint:
    chunks = {index: ChunkExecutable(chunk, groups) for index, chunk in program.chunks.items()}
    owned = [p.slot for p in program.parameters if program.stage_of(p.owner) == program.stage]
    stored = {slot.target: _empty(slot, groups) for slot in owned}
    with torch.no_grad(), StorageMeter() as meter:
        record = _Record(meter, list(stored.values()))
        working: dict[int, dict[str, torch.Tensor]] = {}
        for index, chunk in chunks.items():
            slots = chunk.program.parameters
            given = [stored.get(s.target, _empty(s, groups)) for s in slots]
            working[index] = dict(zip((s.target for s in slots), chunk.refresh(given), strict=True))
            record.add("weight", list(working[index].values()), ())

        def inputs(index: int, microbatch: int) -> Tensors:
            chunk = chunks[index]
            return _given(chunk.program.placeholders, working[index], chunk.constants, lambda s: _empty(s, groups))

        tangents = {i: [_empty(s, groups) for s in c.program.tangents] for i, c in chunks.items()}
        run = _Rehearsed(program, chunks, _Nobody(), inputs, tangents, groups.device, record=record)  # type: ignore[arg-type]
        run.run()
        gradients = [value for values in run.gradients.values() for value in values]
        names = [slot.target for i in run.gradients for slot in chunks[i].program.gradients]
        record.add("gradient", gradients, names)
        found = record.footprint(gradients)
    return found


@dataclass
class _Rehearsed(PipelineRun):
    """A pass that tells ``record`` what it saves."""

    record: _Record | None = None

    def _do(self, action: Any) -> None:
        super()._do(action)
        task = (action.chunk, action.microbatch)
        if action.kind == "forward" and self.record is not None and task in self._saved:
            names = self.chunks[action.chunk].program.input_gradient.inputs
            self.record.add("activation", self._saved[task], names)
        more = self._made.get(action.chunk, 0) < self.program.microbatches
        if action.kind in ("backward", "weight_gradient") and more and self.record is not None:
            paths = [slot.target for slot in self.chunks[action.chunk].program.gradients]
            self.record.add("gradient", self._raw[action.chunk], paths)
