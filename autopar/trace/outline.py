"""Finds equal calls of modules in a recorded program, so that one of them can represent all.

Two calls are equal if their operations are, one by one: operator, arguments that are not tensors, the origin of each
operand (which result inside the call, or which of the tensors from outside, in order of first use), shapes, strides,
dtypes, gradient modes, and which results are used outside. The classes and attributes of modules, and their position in
the model, do not matter: a block that differs for one layer alone has another program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from autopar.torch_internals.fake_tensors import expression_of
from autopar.torch_internals.operators import schema_of
from autopar.torch_internals.tensors import storage_key

from .record import RecordedOp, Recording, Ref, Region, leaves

# Chosen, not measured.
WORTHWHILE = 24  # operations that outlining must save for a kind of call.


@dataclass(frozen=True)
class Body:
    """The body of equal calls, taken from the first of them: its operations, the numbers of the tensors it takes from
    outside, in order of first use, and of those computed inside and used outside afterwards."""

    index: int
    instructions: tuple[RecordedOp, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """One call of a body, from instruction ``start`` to before ``end``; ``paths`` has the module of each operation."""

    index: int
    body: Body
    start: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    paths: tuple[str | None, ...]


@dataclass(frozen=True)
class Outlined:
    """A program in which some calls are taken out of line."""

    program: Recording
    sites: tuple[Site, ...]

    def steps(self) -> Iterator[RecordedOp | Site]:
        """Yields sites and the operations between them, in order."""
        done = 0
        for site in self.sites:
            yield from self.program.instructions[done : site.start]
            yield site
            done = site.end
        yield from self.program.instructions[done:]


def outline(program: Recording) -> Outlined:
    """Takes equal calls out of line, outer ones before those inside them, where that saves enough operations."""
    finder = _Finder(program)
    chosen: list[tuple[Region, Hashable]] = []
    frontier = list(program.regions)
    while frontier:
        keys = [finder.key(region) for region in frontier]
        counts = Counter(key for key in keys if key is not None)
        inside: list[Region] = []
        for region, key in zip(frontier, keys, strict=True):
            if key is not None and (counts[key] - 1) * (region.end - region.start) >= WORTHWHILE:
                chosen.append((region, key))
            else:
                inside += region.children
        frontier = inside
    bodies: dict[Hashable, Body] = {}
    sites: list[Site] = []
    for region, key in sorted(chosen, key=lambda item: item[0].start):
        instructions, ends = program.instructions[region.start : region.end], finder.ends(region)
        body = bodies.setdefault(key, Body(len(bodies), instructions, *ends))
        paths = tuple(instruction.path for instruction in instructions)
        sites.append(Site(len(sites), body, region.start, region.end, *ends, paths))
    return Outlined(program, tuple(sites))


class _Memory(NamedTuple):
    """The positions of operations that access some memory (-1: before the program), and of those that write to it."""

    seen: list[int]
    written: list[int]


class _Finder:
    """Describes and compares the calls of one program."""

    def __init__(self, program: Recording) -> None:
        self.program = program
        self._signatures: dict[Hashable, int] = {}
        self._last_use: dict[int, int] = {}
        for position, instruction in enumerate(program.instructions):
            self._last_use.update(dict.fromkeys(instruction.operands, position))
        self._last_use.update(dict.fromkeys(program.outputs, len(program.instructions)))

    @cached_property
    def _signature_of(self) -> list[int]:
        """A number for each instruction, equal for instructions that differ only in which tensors they take."""
        return [
            self._signatures.setdefault(self._signature(instruction), len(self._signatures))
            for instruction in self.program.instructions
        ]

    def _signature(self, instruction: RecordedOp) -> Hashable:
        arguments = (instruction.args, *sorted(instruction.kwargs.items()))
        types = tuple(None if n is None else self.type_of(n) for n in instruction.results)
        return instruction.op, plain(arguments), instruction.requires_grad, types, instruction.grad_mode

    def type_of(self, number: int) -> Hashable:
        """The properties that two tensors must share to count as equal."""
        return tensor_kind(self.program.tensors[number]), number in self.program.constants

    def ends(self, region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tensors taken from outside, in order of first use, and those computed inside and used afterwards."""
        produced: dict[int, None] = {}
        taken: dict[int, None] = {}
        for instruction in self.program.instructions[region.start : region.end]:
            taken.update((number, None) for number in instruction.operands if number not in produced)
            produced.update(
                (number, None) for number in instruction.results if number is not None and number not in taken
            )
        return tuple(taken), tuple(n for n in produced if self._last_use.get(n, -1) >= region.end)

    @cached_property
    def _written(self) -> list[_Memory]:
        """The memories that some operation writes to."""
        program = self.program
        written = {number for instruction in program.instructions for number in _written_by(instruction)}
        memories = {_memory(program.tensors[number]): _Memory([], []) for number in written}

        def see(position: int, numbers: Iterable[int], writes: Iterable[int] = ()) -> None:
            for memory in {_memory(program.tensors[number]) for number in numbers} & memories.keys():
                memories[memory].seen.append(position)
            for number in writes:
                memories[_memory(program.tensors[number])].written.append(position)

        see(-1, (*range(program.inputs), *program.constants))
        for position, instruction in enumerate(program.instructions if memories else ()):
            results = (number for number in instruction.results if number is not None)
            see(position, (*instruction.operands, *results), _written_by(instruction))
        return list(memories.values())

    def _writes_across(self, region: Region) -> bool:
        """Whether memory that the call accesses is written to, except memory whose last write is before the call, or
        that only the call itself creates and writes."""
        for memory in self._written:
            if any(region.start <= position < region.end for position in memory.seen):
                finished_before = memory.written[-1] < region.start
                own = memory.seen[0] >= region.start and memory.written[-1] < region.end
                if not finished_before and not own:
                    return True
        return False

    def key(self, region: Region) -> Hashable | None:
        """A key that is equal for equal calls; None for a call that cannot be taken out of line."""
        if region.start == region.end or self._writes_across(region):
            return None
        inputs, outputs = self.ends(region)
        local = {number: position for position, number in enumerate(inputs)}
        flow: list[Hashable] = []
        for position in range(region.start, region.end):
            instruction = self.program.instructions[position]
            flow.append((self._signature_of[position], *(local[number] for number in instruction.operands)))
            for number in instruction.results:
                if number is not None:
                    local.setdefault(number, len(local))
        return tuple(flow), tuple(map(self.type_of, inputs)), tuple(local[number] for number in outputs)


def _written_by(instruction: RecordedOp) -> list[int]:
    """The operands that an operation writes to."""
    schema = schema_of(instruction.op)
    if not schema.is_mutable:
        return []
    arguments = dict(zip((argument.name for argument in schema.arguments), instruction.args, strict=False))
    arguments.update(instruction.kwargs)
    writes = [arguments.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [ref.number for ref in leaves(writes, Ref)]


def _memory(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def tensor_kind(tensor: torch.Tensor) -> Hashable:
    """What two tensors must share to be used in the same way: their sizes, strides, dtype and device, and whether they
    require a gradient."""
    sizes = (*map(_size, tensor.shape), *map(_size, tensor.stride()))
    return sizes, tensor.dtype, tensor.device, tensor.requires_grad


def _size(size: Any) -> Hashable:
    expression: Hashable = expression_of(size) if isinstance(size, torch.SymInt) else size
    return expression


def plain(arg: Any) -> Hashable:
    """An argument in a form to compare: numbers by type and value, everything else by identity."""
    match arg:
        case Ref():
            return Ref
        case tuple() | list():
            return tuple(map(plain, arg))
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return repr(expression_of(arg))
        case None | bool() | int() | float() | complex() | str() | torch.dtype() | torch.device() | torch.layout():
            return type(arg), repr(arg)
        case torch.memory_format():
            return repr(arg)
    return id(arg)
