"""Counts the collectives of a lowered program, to compare them with those that were priced.

Runs the program of one rank on fake tensors, without knowledge of plans, hops or prices: the bytes of a collective are
those of its actual operand. A bucketed collective counts once for each of its members, since it is priced so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.chunk_program import ChunkProgram
from autopar.ir.node import Arg, Value
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import chunk_bounds, local_shape, longest_chunk
from autopar.ir.program import COLLECTIVES, Instruction, Program, Section, TensorSlot
from autopar.ir.reshard import Collective
from autopar.ops.exchanged_experts import EXCHANGES, message_bytes
from autopar.ops.masked import LOCAL_OPS
from autopar.torch_internals.fake_tensors import FakeTensorMode

WAIT, STORE, FETCH, REST = "collective.wait", "host.store", "host.fetch", "host.rest"


def collectives_of(program: Program) -> Counter[Collective]:
    """How often ``program`` runs each collective in a step: refresh, forward and backward.

    Bytes are those of the full tensor of a group, padding included, as in :mod:`autopar.ir.reshard`; the program must
    be that of a rank which holds the largest shards: the mesh's first, unless shares are unequal.

    >>> from autopar.ir.program import Program, Section
    >>> empty = Section("forward", (), (), ())
    >>> program = Program((2,), (0,), (), (), (), (), (), empty, empty, empty)
    >>> collectives_of(program)
    Counter()
    """
    count = len(program.results)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        reader = _Reader(program)
        reader.run(program.refresh, _tensors(program, program.parameters))
        saved = reader.run(program.forward, _tensors(program, program.placeholders))[count:]
        if program.gradients:
            reader.run(program.backward, [*saved, *_tensors(program, program.tangents)])
    return reader.found


def collectives_of_stage(program: PipelineProgram) -> Counter[Collective]:
    """The same for one stage of a pipeline. Its chunks run once for each microbatch; refresh, the last weight gradient
    and reduce run once. Messages between stages are not collectives."""
    total: Counter[Collective] = Counter()
    for chunk in program.chunks.values():
        halves = program.schedule.weight_gradients(chunk.chunk)[-1:] == ("weight_gradient",)
        total += _collectives_of_chunk(chunk, program.microbatches, halves)
    return total


def _collectives_of_chunk(chunk: ChunkProgram, microbatches: int, halves: bool) -> Counter[Collective]:
    """``halves``: whether the last backward is in two."""
    count = len(chunk.results) + len(chunk.sends)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        once, each, more = _Reader(chunk), _Reader(chunk), _Reader(chunk)
        once.run(chunk.refresh, _tensors(chunk, chunk.parameters))
        slots = [*chunk.placeholders, *(port.slot for port in chunk.receives)]
        saved = each.run(chunk.forward, _tensors(chunk, slots))[count:]
        if chunk.gradients or chunk.gradient_sends:
            sent = len(chunk.gradient_sends)
            slots = [*chunk.tangents, *(port.slot for port in chunk.gradient_receives)]
            inputs = [*saved, *_tensors(chunk, slots)]
            sums = more.run(chunk.weight_gradient, more.run(chunk.input_gradient, inputs)[sent:])
            sums = sums if microbatches > 1 else []
            carried = once.run(chunk.input_gradient, inputs)[sent:] if halves else inputs
            once.run(chunk.reduce, once.run(chunk.last, [*carried, *sums])[0 if halves else sent :])
    return once.found + _times(each.found, microbatches) + _times(more.found, microbatches - 1)


def _times(counts: Counter[Collective], factor: int) -> Counter[Collective]:
    return Counter({wire: count * factor for wire, count in counts.items()})


def difference(run: Counter[Collective], priced: Counter[Collective]) -> tuple[str, ...]:
    """The collectives that a program runs but were not priced, and those that were priced but it does not run, one per
    line; empty if they agree."""

    def lines(extra: Counter[Collective], verdict: str) -> Iterator[str]:
        for wire, count in sorted(extra.items(), key=str):
            yield f"{verdict}: {count} x {wire.kind} over axes {wire.axes}, {wire.bytes} bytes"

    return (*lines(run - priced, "done but not priced"), *lines(priced - run, "priced but not done"))


def _tensors(program: Program | ChunkProgram, slots: Iterable[TensorSlot]) -> list[torch.Tensor]:
    """The rank's local tensor of each placeholder."""
    return [
        torch.empty(local_shape(slot.shape, slot.placements, program.mesh, program.coordinate), dtype=slot.dtype)
        for slot in slots
    ]


@dataclass
class _Reader:
    """Runs sections on fake tensors and counts their collectives."""

    program: Program | ChunkProgram
    found: Counter[Collective] = field(default_factory=Counter)

    def run(self, section: Section, inputs: Iterable[Any]) -> list[Any]:
        values: dict[Value, Any] = {Value(n): tensor for n, tensor in zip(section.inputs, inputs, strict=True)}
        for instruction in section.instructions:
            result = self._execute(instruction, values)
            results = result if instruction.results > 1 else [result]
            values.update((Value(instruction.name, index), value) for index, value in enumerate(results))
        return [None if value is None else values[value] for value in section.outputs]

    def _execute(self, instruction: Instruction, values: Mapping[Value, Any]) -> Any:
        args = _filled(instruction.args, values)
        kwargs = {key: _filled(arg, values) for key, arg in instruction.kwargs}
        if instruction.op in (WAIT, STORE, FETCH, REST):
            return args[0]
        if (name := instruction.op.removeprefix("collective.")) in EXCHANGES:
            return self._exchange(name, args, tuple(kwargs["axes"]))
        if instruction.op.startswith("collective."):
            return self._communicate(instruction.op.removeprefix("collective."), args, kwargs)
        return _function(instruction.op)(*args, **kwargs)

    def _exchange(self, name: str, args: list[Any], axes: tuple[int, ...]) -> Any:
        """Counts the messages of a block of experts with as many rows as are sent on average; no value is known."""
        parts = math.prod(self.program.mesh[axis] for axis in axes)
        for size in message_bytes(name, args, parts):
            self.found[Collective("all_to_all", axes, parts * size)] += 1
        return LOCAL_OPS[f"autopar.{name.removeprefix('exchanged_')}.default"](*args, 0)

    def _communicate(self, kind: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not kind.endswith("_bucket"):
            return self._single(kind, args[0], kwargs)
        listed = {key: value for key, value in kwargs.items() if key not in ("axes", "op")}
        shared = {key: value for key, value in kwargs.items() if key in ("axes", "op")}
        each = ({key[:-1]: values[i] for key, values in listed.items()} for i in range(len(args[0])))
        single = kind.removesuffix("_bucket")
        return [self._single(single, tensor, shared | own) for tensor, own in zip(args[0], each, strict=True)]

    def _single(self, kind: str, tensor: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
        axes = tuple(given["axes"])
        parts = math.prod(self.program.mesh[axis] for axis in axes)
        if kind in COLLECTIVES:
            self.found[Collective(kind, axes, _bytes(kind, tensor, parts, given))] += 1
        return tensor.new_empty(self._shape(kind, tensor, axes, parts, given))

    def _shape(
        self, kind: str, tensor: torch.Tensor, axes: tuple[int, ...], parts: int, given: Mapping[str, Any]
    ) -> list[int]:
        """The local shape afterwards."""
        index = 0
        for axis in axes:
            index = index * self.program.mesh[axis] + self.program.coordinate[axis]
        shape = list(tensor.shape)
        if kind == "all_gather":
            shape[given["dim"]] = given["size"]
        elif kind == "all_to_all":
            shape[given["gather_dim"]] = given["gather_size"]
        cut = given.get("scatter_dim", given.get("dim") if kind in ("slice", "reduce_scatter") else None)
        if cut is not None:
            before = given.get("scatter_before", given.get("before", 1))
            shares = tuple(given.get("scatter_shares", given.get("shares", ())))
            shape[cut] = before * chunk_bounds(shape[cut] // before, parts, index, shares)[1]
        return shape


def _bytes(kind: str, tensor: torch.Tensor, parts: int, given: Mapping[str, Any]) -> int:
    """Bytes of the full tensor of a group of ``parts`` devices, each of which gives one like ``tensor``, padded to the
    longest."""
    shape = list(tensor.shape)
    side = "gather_" if kind == "all_to_all" else ""
    if f"{side}size" in given:
        size, before = given[f"{side}size"], given.get(f"{side}before", 1)
        shares = tuple(given.get(f"{side}shares", ()))
        shape[given[f"{side}dim"]] = before * longest_chunk(size // before, parts, shares)
    cut = given["scatter_dim"] if kind == "all_to_all" else given["dim"] if kind == "reduce_scatter" else None
    if cut is not None:
        shares = tuple(given.get("scatter_shares" if kind == "all_to_all" else "shares", ()))
        shape[cut] = longest_chunk(shape[cut], parts, shares) * parts
    gathered = parts if kind in ("all_gather", "all_to_all") else 1
    return gathered * math.prod(shape) * tensor.dtype.itemsize


def _function(op: str) -> Callable[..., Any]:
    if op in LOCAL_OPS:
        return LOCAL_OPS[op]
    namespace, name, overload = op.split(".")
    function: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return function


def _filled(arg: Arg, values: Mapping[Value, Any]) -> Any:
    if isinstance(arg, Value):
        return values[arg]
    return [_filled(item, values) for item in arg] if isinstance(arg, tuple) else arg
