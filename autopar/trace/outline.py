"""Finds equal calls of modules in a recorded program, so that one of them can represent all.

Two calls are equal if their operations are, one by one: operator, arguments that are not tensors, the origin of each
operand (which result inside the call, or which of the tensors from outside, in order of first use), shapes, strides,
dtypes, gradient modes, and which results are used outside. The classes and attributes of modules, and their position in
the model, do not matter: a block that differs for one layer alone has another program.

Calls that follow one another without an operation between them, each taking what is differentiated of the one before,
are a *run*: a single operation of the outlined program, however many calls it has. What only calls use of the model's
state is not passed to it, so that torch traces the program in a time that does not grow with the number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from autopar.torch_internals.fake_tensors import expression_of
from autopar.torch_internals.operators import schema_of
from autopar.torch_internals.tensors import storage_key, suggest_memory_format

from .record import RecordedOp, Recording, Ref, Region, leaves

# Chosen, not measured.
WORTHWHILE = 24  # operations that outlining must save for a kind of call.

# Which results of a call got a gradient.
Received = tuple[int, ...]


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
class Run:
    """Calls one after the other. ``inputs``: tensors from outside that it takes, without those that are hidden;
    ``outputs``: those computed inside and used afterwards. ``learns``: whether hidden tensors require a gradient."""

    index: int
    sites: tuple[Site, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    learns: bool


@dataclass(frozen=True)
class Flow:
    """How gradients pass through a run. ``received``: which results of each call get one, by the call's index; calls
    without are left out. ``inputs``: the inputs of the run that get one; ``learns``: whether hidden tensors do."""

    received: dict[int, Received]
    inputs: tuple[int, ...]
    learns: bool


@dataclass(frozen=True)
class Outlined:
    """A program in which some calls are taken out of line. Its first ``given`` tensors are arguments, the inputs after
    them the model's state; the state that is ``hidden`` is used by calls alone: nothing writes to it, and if it
    requires a gradient, a single call uses it."""

    program: Recording
    given: int
    sites: tuple[Site, ...]
    runs: tuple[Run, ...]
    hidden: frozenset[int]
    _differentiable: dict[tuple[int, Received], tuple[int, ...]] = field(default_factory=dict)

    def steps(self) -> Iterator[RecordedOp | Run]:
        """Yields runs and the operations between them, in order."""
        done = 0
        for run in self.runs:
            yield from self.program.instructions[done : run.sites[0].start]
            yield run
            done = run.sites[-1].end
        yield from self.program.instructions[done:]

    def differentiable(self, body: Body, received: Received) -> tuple[int, ...]:
        """The inputs of a body that get a gradient if only the results ``received`` do."""
        key = body.index, received
        if key not in self._differentiable:
            self._differentiable[key] = _differentiable_inputs(self.program, body, received)
        return self._differentiable[key]

    def flow(self, run: Run, received: Received) -> Flow:
        """The gradients of a run of whose results only ``received`` get one."""
        known, by_site = {run.outputs[index] for index in received}, dict[int, Received]()
        for site in reversed(run.sites):
            own = tuple(index for index, number in enumerate(site.outputs) if number in known)
            differentiable = self.differentiable(site.body, own)
            if differentiable:
                by_site[site.index] = own
                known.update(site.inputs[index] for index in differentiable)
        inputs = tuple(index for index, number in enumerate(run.inputs) if number in known)
        return Flow(by_site, inputs, not known.isdisjoint(self.hidden))


def _differentiable_inputs(program: Recording, body: Body, received: Received) -> tuple[int, ...]:
    differentiable = {body.outputs[index] for index in received}
    for instruction in reversed(body.instructions):
        results = (number for number in instruction.results if number in differentiable)
        if instruction.grad_mode and any(program.tensors[number].requires_grad for number in results):
            pairs = zip(instruction.operands, instruction.requires_grad, strict=True)
            differentiable.update(number for number, needs in pairs if needs)
    return tuple(i for i, number in enumerate(body.inputs) if number in differentiable)


def format_of(result: torch.Tensor) -> torch.memory_format:
    """The memory format that torch's tracer assumes for the gradient of ``result``."""
    memory_format: torch.memory_format = suggest_memory_format(result)
    return memory_format


def outline(program: Recording, given: int) -> Outlined:
    """Takes equal calls out of line, outer ones before those inside them, where that saves enough operations. The first
    ``given`` inputs of the program are arguments, the others the model's state."""
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
    found = _Runs(program, given, sites, finder.is_written)
    return Outlined(program, given, tuple(sites), found.every(), found.hidden)


class _Memory(NamedTuple):
    """The positions of operations that access some memory (-1: before the program), and of those that write to it."""

    seen: list[int]
    written: list[int]


class _Finder:
    """Describes and compares the calls of one program."""

    def __init__(self, program: Recording) -> None:
        self.program = program
        self._signatures: dict[Hashable, int] = {}
        self._kinds: dict[int, Hashable] = {}
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
        tensor = self.program.tensors[number]
        if id(tensor) not in self._kinds:  # Results of calls that did not run are the same objects.
            self._kinds[id(tensor)] = tensor_kind(tensor)
        return self._kinds[id(tensor)], number in self.program.constants

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

    def is_written(self, number: int) -> bool:
        """Whether some operation writes to the memory of a tensor."""
        return bool(self._written) and _memory(self.program.tensors[number]) in self._written

    @cached_property
    def _written(self) -> dict[int, _Memory]:
        """The memories that some operation writes to."""
        program = self.program
        written = {number for instruction in program.instructions for number in written_by(instruction)}
        memories = {_memory(program.tensors[number]): _Memory([], []) for number in written}

        def see(position: int, numbers: Iterable[int], writes: Iterable[int] = ()) -> None:
            for memory in {_memory(program.tensors[number]) for number in numbers} & memories.keys():
                memories[memory].seen.append(position)
            for number in writes:
                memories[_memory(program.tensors[number])].written.append(position)

        see(-1, (*range(program.inputs), *program.constants))
        for position, instruction in enumerate(program.instructions if memories else ()):
            results = (number for number in instruction.results if number is not None)
            see(position, (*instruction.operands, *results), written_by(instruction))
        return memories

    def _writes_across(self, region: Region) -> bool:
        """Whether memory that the call accesses is written to, except memory whose last write is before the call, or
        that only the call itself creates and writes."""
        for memory in self._written.values():
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


class _Runs:
    """Joins the calls of a program into runs."""

    def __init__(
        self, program: Recording, given: int, sites: Sequence[Site], is_written: Callable[[int], bool]
    ) -> None:
        self.program, self.sites = program, sites
        # Which calls read each tensor; None for operations outside of them, and for results of the program.
        self.readers: dict[int, list[int | None]] = {}
        self._read(program.outputs, None)
        done = 0
        for site in (*sites, None):
            for instruction in program.instructions[done : site.start if site else None]:
                self._read(instruction.operands, None)
            if site is not None:
                self._read(site.inputs, site.index)
                done = site.end
        state = range(given, program.inputs)
        self.hidden = frozenset(n for n in state if self._only_calls_use(n) and not is_written(n))

    def _read(self, numbers: Iterable[int], reader: int | None) -> None:
        for number in numbers:
            self.readers.setdefault(number, []).append(reader)

    def _only_calls_use(self, number: int) -> bool:
        readers = self.readers.get(number, [])
        return None not in readers and (len(readers) < 2 or not self.program.tensors[number].requires_grad)

    def every(self) -> tuple[Run, ...]:
        """All runs, each as long as can be."""
        groups: list[list[Site]] = [[site] for site in self.sites[:1]]
        for before, site in pairwise(self.sites):
            if self._continues(before, site):
                groups[-1].append(site)
            else:
                groups.append([site])
        return tuple(self._run(index, sites) for index, sites in enumerate(groups))

    def _continues(self, before: Site, site: Site) -> bool:
        """Whether all gradients that ``before`` gets are those that ``site`` computes of its own inputs, which it would
        get as they are."""
        tensors = self.program.tensors
        handed_on = [number for number in before.outputs if tensors[number].requires_grad]
        taken = (n for n in site.inputs if tensors[n].requires_grad and n not in self.hidden)
        return (
            before.end == site.start
            and all(self.readers[number] == [site.index] for number in handed_on)
            and set(taken) <= set(handed_on)
            and all(tensors[n].is_contiguous(memory_format=format_of(tensors[n])) for n in handed_on)
        )

    def _run(self, index: int, sites: Sequence[Site]) -> Run:
        own = {site.index for site in sites}
        produced = dict.fromkeys(number for site in sites for number in site.outputs)
        taken = dict.fromkeys(number for site in sites for number in site.inputs if number not in produced)
        hidden = [number for number in taken if number in self.hidden]
        return Run(
            index,
            tuple(sites),
            tuple(number for number in taken if number not in self.hidden),
            tuple(number for number in produced if not own.issuperset(self.readers[number])),
            any(self.program.tensors[number].requires_grad for number in hidden),
        )


def written_by(instruction: RecordedOp) -> list[int]:
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
