"""Rehearses a step on meta tensors, to predict its memory.

It runs the same code as a step (sections, collectives with their buffers, the actions of a schedule), on tensors
without data and groups without other ranks, and counts live bytes. So the figure is that of a real step of the
program's rank, except for memory that kernels allocate internally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

from autopar.ir.chunk_program import ChunkProgram
from autopar.ir.node import Value
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import local_shape
from autopar.ir.program import Program, TensorSlot
from autopar.ops.attention_kernels import kernels_of
from autopar.runtime.comm.groups import AxisGroup, Listener, MeshGroups
from autopar.runtime.execute.executor import own_constants, runner
from autopar.runtime.execute.host_tier import HostCopy
from autopar.runtime.pipeline.action_loop import PipelineRun
from autopar.runtime.pipeline.chunk_executable import ChunkExecutable
from autopar.runtime.pipeline.point_to_point import IN_FLIGHT, Arrival, Crossing

from .imagined_memory import ImaginedMeter
from .remembered_instructions import RememberedInstructions, UnimaginableError
from .storage_meter import StorageMeter

META = torch.device("meta")
Tensors = list[torch.Tensor]
AnyProgram = TypeVar("AnyProgram", Program, ChunkProgram)


@dataclass(frozen=True)
class Footprint:
    """Live bytes of a rank at the memory peak: ``weights`` (stored and working), ``gradients``, ``activations`` (saved
    for backward), ``inputs``, and all others, which are ``temporary``. ``stored``, ``accumulated``: bytes of stored
    parameters and of all gradients after the step. ``held``: bytes by (kind, name) of each gradient (named by its
    parameter) and activation (by its value) among them. ``peaks``: of a step of one pass, the most bytes live in each
    of its parts: before forward, forward, and the first and the second half of backward."""

    weights: int
    gradients: int
    activations: int
    inputs: int
    temporary: int
    stored: int
    accumulated: int
    held: Mapping[tuple[str, str], int] = field(default_factory=dict)
    peaks: tuple[int, ...] = ()

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.activations + self.inputs + self.temporary


class ImaginedGroups(MeshGroups):
    """Groups of the rank at ``coordinate`` of a mesh of ``shape``, without other ranks; ``backend`` decides which
    buffers collectives allocate, on ``device``. ``listener`` hears of each collective."""

    def __init__(
        self,
        shape: tuple[int, ...],
        coordinate: tuple[int, ...],
        backend: str,
        device: torch.device = META,
        listener: Listener | None = None,
    ) -> None:
        self.shape, self.coordinate = shape, coordinate
        self._backend, self._device, self._listener = backend, device, listener
        self._by_axes: dict[tuple[int, ...], AxisGroup] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def _make(self, axes: tuple[int, ...]) -> AxisGroup:
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + self.coordinate[axis]
        size = math.prod(self.shape[a] for a in axes)
        return AxisGroup(None, size, index, self._device.type, self._backend, axes, self._listener)


def rehearse(program: Program | PipelineProgram, backend: str = "nccl", device: torch.device = META) -> Footprint:
    """The footprint of one training step of ``program`` on ``device``, whose tensors have no data: meta, or any within
    ``FakeTensorMode``. Attention on meta tensors allocates what its kernel for GPUs does if the backend is NCCL.
    Raises the error of an operation that does not support such tensors."""
    with kernels_of("cuda" if backend == "nccl" else "cpu"):
        if isinstance(program, Program):
            groups = ImaginedGroups(program.mesh, program.coordinate, backend, device)
            own = without_data(program)
            if device == META:
                with suppress(UnimaginableError):
                    return _rehearse_whole(own, groups, ImaginedMeter())
            return _rehearse_whole(own, groups, StorageMeter())
        inside = program.meshes.meshes[program.stage]
        groups = ImaginedGroups(inside, program.coordinate[1:], backend, device)
        chunks = {index: without_data(chunk) for index, chunk in program.chunks.items()}
        return _rehearse_stages(replace(program, chunks=chunks), groups)


def without_data(program: AnyProgram) -> AnyProgram:
    """``program``, with constants that are on the meta device."""
    constants = {name: constant.to("meta") for name, constant in program.constants.items()}
    return replace(program, constants=constants)


def empty_slot(slot: TensorSlot, groups: MeshGroups) -> torch.Tensor:
    shape = local_shape(slot.shape, slot.placements, groups.shape, groups.coordinate)
    return torch.empty(shape, dtype=slot.dtype, device=groups.device)


def stored_parameters(program: AnyProgram, slots: Sequence[TensorSlot], groups: MeshGroups) -> list[Any]:
    """The stored parameters in ``slots``; those in host memory take none of the device's."""
    refresh = program.refresh
    away = {i.args[0].node for i in refresh.instructions if i.op == "host.rest" and isinstance(i.args[0], Value)}
    names = dict(zip((slot.target for slot in program.parameters), refresh.inputs, strict=True))

    def made(slot: TensorSlot) -> Any:
        data = empty_slot(slot, groups)
        if names.get(slot.target) not in away:
            return data
        return HostCopy(data.shape, data.stride(), data.dtype)

    return list(map(made, slots))


def forward_inputs(
    slots: Iterable[TensorSlot],
    working: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    empty: Callable[[TensorSlot], torch.Tensor],
) -> Tensors:
    """The inputs of forward: working parameters and constants, and ``empty`` tensors for all others."""
    existing = {"param": working, "constant": constants}
    return [existing[slot.kind][slot.target] if slot.kind in existing else empty(slot) for slot in slots]


def _rehearse_whole(program: Program, groups: MeshGroups, meter: StorageMeter | ImaginedMeter) -> Footprint:
    """The footprint of a step of one pass, run on tensors or, by an :class:`ImaginedMeter`, on imagined ones. Raises
    :class:`UnimaginableError` where these do not suffice."""
    refresh, forward, backward = _runners(program, groups, meter)

    def empty(slot: TensorSlot) -> Any:
        (made,) = _counted_by(meter, [empty_slot(slot, groups)])
        return made

    stored = _counted_by(meter, stored_parameters(program, program.parameters, groups))
    own = own_constants(program.placeholders, program.constants, groups)
    constants = dict(zip(own, _counted_by(meter, list(own.values())), strict=True))
    with torch.no_grad(), meter:
        record = _Record(meter, stored)
        working = refresh(list(stored))
        record.add("weight", working, ())
        began = [0, meter.events + 1]
        by_path = dict(zip((slot.target for slot in program.parameters), working, strict=True))
        inputs = forward_inputs(program.placeholders, by_path, constants, empty)
        record.add("input", inputs, ())
        values = forward(list(inputs))
        began.append(meter.events + 1)
        del working, by_path
        count = len(program.results)
        results, saved = values[:count], values[count:]
        del values
        record.add("activation", saved, program.backward.inputs)
        ones = list(map(empty, program.tangents))
        del inputs
        everything = [*saved, *ones]
        del saved
        gradients = backward(everything) if program.gradients else []
        record.add("gradient", gradients, tuple(slot.target for slot in program.gradients))
        footprint = record.footprint(gradients)
    del results
    ended = meter.events + 1
    parts = pairwise([*began, (began[-1] + ended) // 2, ended])
    return replace(footprint, peaks=tuple(meter.peak_between(*part) for part in parts))


def _runners(
    program: Program, groups: MeshGroups, meter: StorageMeter | ImaginedMeter
) -> Iterator[Callable[[list[Any]], list[Any]]]:
    """What runs each section of ``program``."""
    sections = program.refresh, program.forward, program.backward
    if isinstance(meter, ImaginedMeter):
        return map(RememberedInstructions(groups, meter).runner, sections)
    return (runner(section, groups, "a rehearsal") for section in sections)


def _counted_by(meter: StorageMeter | ImaginedMeter, tensors: list[Any]) -> list[Any]:
    """``tensors`` as ``meter`` counts them. Raises :class:`UnimaginableError` for copies in host memory."""
    if not isinstance(meter, ImaginedMeter):
        return tensors
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise UnimaginableError("a parameter rests in another memory")
    return meter.imagine(tensors)


class _Record:
    """Records the kind and name of each storage; the first one counts. Gradients that are reduced together share a
    storage, of which each has its part."""

    def __init__(self, meter: StorageMeter | ImaginedMeter, stored: Sequence[Any]) -> None:
        self.meter: Any = meter
        self.known: dict[int, tuple[str, dict[str, int], Any]] = {}
        self.stored = sum(memory[1] for memory in map(meter.memory_of, stored) if memory is not None)
        self.add("weight", stored, ())

    def add(self, kind: str, tensors: Sequence[Any], names: Sequence[str]) -> None:
        for position, tensor in enumerate(tensors):
            if self.meter.memory_of(tensor) is None:  # No tensor, or a copy in host memory.
                continue
            self.meter.see(tensor)
            life = self.meter.life(tensor)
            if life is None:
                continue
            first, parts, _ = self.known.setdefault(id(life), (kind, {}, life))
            if first == kind and (not parts or kind == "gradient"):
                parts.setdefault(names[position] if names else "", tensor.nbytes)

    def footprint(self, gradients: Sequence[Any]) -> Footprint:
        sums = dict.fromkeys(("weight", "gradient", "activation", "input"), 0)
        held: dict[tuple[str, str], int] = {}
        for kind, parts, life in self.known.values():
            alive = self.meter.at_peak(life)
            sums[kind] += alive
            for name, count in _divided(alive, parts).items():
                if count and name:
                    held[kind, name] = held.get((kind, name), 0) + count
        rest = self.meter.peak - sum(sums.values())
        storages = dict(filter(None, map(self.meter.memory_of, gradients)))
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


def _divided(total: int, parts: Mapping[str, int]) -> dict[str, int]:
    """``total`` bytes in the proportion of ``parts``."""
    whole = max(sum(parts.values()), 1)
    ends = (total * end // whole for end in accumulate(parts.values(), initial=0))
    return {name: end - begin for name, (begin, end) in zip(parts, pairwise(ends), strict=True)}


class NoPeers:
    """A messenger without peers: keeps messages for other stages as long as a real one does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[int, list[Tensors]] = {}

    def send(self, tensors: Sequence[torch.Tensor], crossings: Sequence[Crossing], stage: int) -> None:
        queue = self._sent.setdefault(stage, [])
        pairs = zip(tensors, crossings, strict=True)
        queue.append([piece.of(tensor).contiguous() for tensor, crossing in pairs for piece in crossing.pieces])
        del queue[:-IN_FLIGHT]

    def receive(self, crossings: Sequence[Crossing], stage: int) -> Arrival:
        return Arrival([torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in crossings])

    def finish(self) -> None:
        self._sent.clear()


def _caches(program: PipelineProgram, groups: MeshGroups) -> dict[tuple[str, int], torch.Tensor]:
    """The caches that rest on the device, by name and microbatch."""
    slots = [s for chunk in program.chunks.values() for s in chunk.placeholders if s.kind == "cache"]
    return {(slot.target, k): empty_slot(slot, groups) for slot in slots for k in range(program.microbatches)}


def _rehearse_stages(program: PipelineProgram, groups: MeshGroups) -> Footprint:
    def mesh_of(chunk: int) -> tuple[int, ...]:
        return program.meshes.meshes[program.stage_of(chunk)]

    chunks = {index: ChunkExecutable(chunk, groups, mesh_of) for index, chunk in program.chunks.items()}
    owned = [p for p in program.parameters if program.stage_of(p.owner) == program.stage]
    stored: dict[str, Any] = {}
    for parameter in owned:
        owner, slot = program.chunks[parameter.owner], parameter.slot
        (stored[slot.target],) = stored_parameters(owner, [slot], groups)
    with torch.no_grad(), StorageMeter() as meter:
        record = _Record(meter, list(stored.values()))
        working: dict[int, dict[str, torch.Tensor]] = {}
        for index, chunk in chunks.items():
            slots = chunk.program.parameters
            parameters = [stored[s.target] if s.target in stored else empty_slot(s, groups) for s in slots]
            working[index] = dict(zip((s.target for s in slots), chunk.refresh(parameters), strict=True))
            record.add("weight", list(working[index].values()), ())

        resting = _caches(program, groups)
        record.add("input", list(resting.values()), ())

        def inputs(index: int, microbatch: int) -> Tensors:
            def empty(slot: TensorSlot) -> torch.Tensor:
                own = resting.get((slot.target, microbatch)) if slot.kind == "cache" else None
                return empty_slot(slot, groups) if own is None else own

            chunk = chunks[index]
            return forward_inputs(chunk.program.placeholders, working[index], chunk.constants, empty)

        tangents = {i: [empty_slot(s, groups) for s in c.program.tangents] for i, c in chunks.items()}
        run = _Rehearsed(program, chunks, NoPeers(groups.device), inputs, tangents, record=record)  # type: ignore[arg-type]
        run.run()
        gradients = [value for values in run.gradients.values() for value in values]
        names = [slot.target for i in run.gradients for slot in chunks[i].program.gradients]
        record.add("gradient", gradients, names)
        footprint = record.footprint(gradients)
    return footprint


@dataclass
class _Rehearsed(PipelineRun):
    """A run that reports saved values and gradients to ``record``."""

    record: _Record | None = None

    def _do(self, action: Any) -> None:
        super()._do(action)
        task = (action.chunk, action.microbatch)
        if action.kind == "forward" and self.record is not None and task in self._saved:
            names = self.chunks[action.chunk].program.input_gradient.inputs
            self.record.add("activation", self._saved[task], names)
        has_more = self._computed.get(action.chunk, 0) < self.program.microbatches
        if action.kind in ("backward", "weight_gradient") and has_more and self.record is not None:
            paths = [slot.target for slot in self.chunks[action.chunk].program.gradients]
            self.record.add("gradient", self._raw[action.chunk], paths)
