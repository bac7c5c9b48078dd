"""Runs a section on imagined tensors: an instruction runs on meta tensors once for all that are alike.

What an instruction does to memory follows from its operation, its arguments and, of tensors, from their kinds and
which of them share memory: so many bytes are allocated and freed, its results lie in some of these or in memory of its
operands, and a communication keeps some of both until it is awaited. This is its :class:`_Effect`. Layers have the same
instructions again and again, so that a step of any depth has few. What is not known to follow from that (copies in host
memory, tensors with data, memory that something else keeps) is an :class:`UnimaginableError`: then all instructions are
to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from autopar.ir.node import Arg, Value
from autopar.ir.program import Instruction, Section
from autopar.runtime.comm.collectives import Collectives, Handle
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.casts_at_once import with_casts_at_once
from autopar.runtime.execute.executor import REFRESH, operations_of
from autopar.runtime.execute.in_place import WRITING, in_place, writing
from autopar.runtime.execute.torch_operations import Operation, function_of, resolve_aten
from autopar.torch_internals.tensors import storage_key

from .imagined_memory import Imagined, ImaginedMeter, Kind, Storage
from .storage_meter import StorageMeter

META = torch.device("meta")
_WAIT = "collective.wait"
# The types of most arguments that are no values.
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device))


class UnimaginableError(Exception):
    """An instruction whose effect on memory is not known to be that of others like it."""


@dataclass(frozen=True, slots=True)
class _Result:
    """A result: its kind, and its storage among those of the effect (-1: one without bytes)."""

    kind: Kind
    storage: int


@dataclass(slots=True)
class _Effect:
    """What an instruction does. Storages are numbered: those that it is given, then those that it allocates, in order.
    ``events``: bytes of each that it allocates, and the number of each that it drops, as ``(bytes, -1)`` and ``(0,
    number)``. ``held``: what a communication in flight keeps; ``handle`` is that communication, until what awaiting it
    does is known."""

    events: tuple[tuple[int, int], ...]
    results: tuple[_Result | None, ...]
    held: tuple[int, ...] = ()
    is_started: bool = False
    handle: Handle | None = None
    log: _Log | None = None
    awaited: _Effect | None = None


@dataclass(slots=True)
class InFlight:
    """A communication that has started; ``held``: the storages that it keeps."""

    effect: _Effect
    held: list[Storage | None]


class _Log(StorageMeter):
    """Records what is allocated and freed: ``(key, bytes)`` of each storage, 0 bytes where it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.keys: list[int] = []  # Of what a communication keeps, in order.

    def see(self, tensor: torch.Tensor) -> None:
        before = self.events
        super().see(tensor)
        if self.events > before:
            storage = tensor.untyped_storage()
            self.seen.append((storage_key(storage), storage.nbytes()))

    def _gone(self, key: int, life: Any, reference: object) -> None:
        super()._gone(key, life, reference)
        self.seen.append((key, 0))


@dataclass
class RememberedInstructions:
    """The effects of instructions met so far, on the devices of ``groups``, counted by ``meter``."""

    groups: MeshGroups
    meter: ImaginedMeter
    _effects: dict[Hashable, _Effect] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._operations = operations_of(Collectives(self.groups))

    def runner(self, section: Section) -> Callable[[list[Any]], list[Any]]:
        """A function that runs ``section`` on a list of imagined tensors, which it empties."""
        section = with_casts_at_once(section) if section.name == REFRESH else section
        written = in_place(section)
        operands = [instruction.operands for instruction in section.instructions]
        last = {value: index for index, values in enumerate(operands) for value in values}
        last |= {value: len(operands) for value in section.outputs if value is not None}

        def run(inputs: list[Any]) -> list[Any]:
            values = {
                Value(name): each for name, each in zip(section.inputs, inputs, strict=True) if Value(name) in last
            }
            inputs.clear()
            for index, instruction in enumerate(section.instructions):
                own = operands[index]
                results = self._run(instruction, [values[v] for v in own], written.get(instruction.name, ()))
                for position in range(instruction.results):
                    name = Value(instruction.name, position)
                    if name in last:
                        values[name] = results[position]
                del results
                for value in own:
                    if last[value] == index:
                        values.pop(value, None)
            return [None if value is None else values[value] for value in section.outputs]

        return run

    def _run(self, instruction: Instruction, operands: list[Any], places: tuple[int, ...]) -> list[Any]:
        if instruction.op == _WAIT:
            (flight,) = operands
            return self._await(flight)
        numbers: dict[int, int] = {}
        storages: list[Storage | None] = []
        described: list[tuple[int, int]] = []
        for operand in operands:
            if type(operand) is not Imagined:
                raise UnimaginableError(f"{instruction.op} takes a {type(operand).__name__}")
            key = id(operand.storage)
            if key not in numbers:
                numbers[key] = len(storages)
                storages.append(operand.storage)
            described.append((operand.kind.number, numbers[key]))
        form = instruction.op, places, _key(instruction.args), _key(instruction.kwargs) if instruction.kwargs else ()
        whole = form, tuple(described)
        effect = self._effects.get(whole)
        if effect is None:
            kinds = [operand.kind for operand in operands]
            sizes = [storage.nbytes for storage in storages if storage is not None]
            pairs = [(kind, number) for kind, (_, number) in zip(kinds, described, strict=True)]
            effect = self._effects[whole] = self._recorded(instruction, pairs, sizes, places)
        self._play(effect, storages)
        if effect.is_started:
            return [InFlight(effect, [storages[number] for number in effect.held])]
        return self._results(effect, storages)

    def _await(self, flight: Any) -> list[Any]:
        if not isinstance(flight, InFlight):
            raise UnimaginableError("waits for something other than a communication")
        if flight.effect.awaited is None:
            flight.effect.awaited = self._recorded_wait(flight.effect)
        effect, count = flight.effect.awaited, len(flight.held)
        storages = flight.held
        self._play(effect, storages)
        results = self._results(effect, storages)
        del storages[count:]  # What it has allocated, its results alone keep.
        return results

    def _play(self, effect: _Effect, storages: list[Storage | None]) -> None:
        """Does to imagined memory what the effect says, and adds what it allocates to ``storages``."""
        for nbytes, dropped in effect.events:
            if dropped < 0:
                storages.append(self.meter.born(nbytes))
            else:
                storages[dropped] = None

    def _results(self, effect: _Effect, storages: Sequence[Storage | None]) -> list[Any]:
        found: list[Any] = []
        for result in effect.results:
            if result is None:
                found.append(None)
                continue
            storage = Storage(0, self.meter) if result.storage < 0 else storages[result.storage]
            assert storage is not None
            found.append(Imagined(result.kind, storage))
        return found

    def _recorded(
        self, instruction: Instruction, operands: list[tuple[Kind, int]], sizes: list[int], places: tuple[int, ...]
    ) -> _Effect:
        """Runs an instruction on tensors of these kinds, each in one of so many bytes of memory."""
        log, function = _Log(), self._function(instruction.op, places)
        memories = [torch.empty(size, dtype=torch.uint8, device=META).untyped_storage() for size in sizes]
        numbers = {storage_key(memory): number for number, memory in enumerate(memories)}
        empty = [storage_key(memory) for memory in memories if not memory.nbytes()]
        tensors = [
            torch.empty(0, dtype=kind.dtype, device=META).set_(memories[number], kind.offset, kind.shape, kind.stride)
            for kind, number in operands
        ]
        deque(map(log.see, tensors), 0)
        given = iter(tensors)
        args = [_argument(arg, given) for arg in instruction.args]
        kwargs = {key: _argument(arg, given) for key, arg in instruction.kwargs}
        del given, tensors, memories
        log.seen.clear()
        try:
            with log:
                result = function(*args, **kwargs)
        except Exception as error:
            raise UnimaginableError(str(error)) from error
        events, numbers = _numbered(log, numbers, len(sizes))
        started = result if isinstance(result, Handle) else None
        results = () if started is not None else self._described(result, numbers)
        for key in empty:
            numbers.pop(key, None)
        del args, kwargs, result
        _settle(log, numbers)
        if started is None:
            _check_nothing_kept(numbers)
            return _Effect(events, results)
        held = dict(sorted((number, key) for key, number in numbers.items()))
        log.keys = list(held.values())
        return _Effect(events, (), tuple(held), True, started, log)

    def _recorded_wait(self, effect: _Effect) -> _Effect:
        handle, log = effect.handle, effect.log
        if handle is None or log is None:
            raise UnimaginableError("a communication is awaited twice")
        numbers = {key: number for number, key in enumerate(log.keys)}
        effect.handle = effect.log = None
        try:
            with log:
                result = handle.wait()
        except Exception as error:
            raise UnimaginableError(str(error)) from error
        events, numbers = _numbered(log, numbers, len(effect.held))
        results = self._described(result, numbers)
        del result, handle
        _settle(log, numbers)
        _check_nothing_kept(numbers)
        return _Effect(events, results)

    def _function(self, op: str, places: tuple[int, ...]) -> Operation:
        operation = self._operations.get(op)
        if operation is None:
            if op.startswith(("autopar.", "collective.", "host.", "compiled.")):
                raise UnimaginableError(f"{op} is not an operation of a rehearsal")
            operation = resolve_aten(op)
        if op.startswith("host."):
            raise UnimaginableError(f"{op} is of another memory")
        return writing(op, places, operation, resolve_aten(WRITING[op])) if places else function_of(operation)

    def _described(self, result: Any, numbers: Mapping[int, int]) -> tuple[_Result | None, ...]:
        parts = result if isinstance(result, (tuple, list)) else (result,)
        described: list[_Result | None] = []
        for part in parts:
            if part is None:
                described.append(None)
                continue
            if type(part) is not torch.Tensor or part.device != META:
                raise UnimaginableError(f"a result is a {type(part).__name__}")
            memory = part.untyped_storage()
            number = numbers.get(storage_key(memory), -1)
            if number < 0 and memory.nbytes():
                raise UnimaginableError("a result lies in memory that nobody allocated")
            described.append(_Result(self.meter.kind_of(part), number))
        return tuple(described)


def _numbered(log: _Log, given: Mapping[int, int], count: int) -> tuple[tuple[tuple[int, int], ...], dict[int, int]]:
    """The events of an effect, and the numbers of the storages that live after them. ``given``: those before, which
    have taken ``count`` numbers."""
    numbers, events = dict(given), list[tuple[int, int]]()
    for key, nbytes in log.seen:
        if nbytes:
            numbers[key], count = count, count + 1
            events.append((nbytes, -1))
        else:
            events.append((0, numbers.pop(key)))
    log.seen.clear()
    return tuple(events), numbers


def _settle(log: _Log, numbers: dict[int, int]) -> None:
    """Takes those away that have been freed since."""
    for key, _ in log.seen:
        numbers.pop(key, None)
    log.seen.clear()


def _check_nothing_kept(numbers: Mapping[int, int]) -> None:
    if numbers:
        raise UnimaginableError("something keeps memory of an instruction")


def _argument(arg: Arg, operands: Any) -> Any:
    """An argument as an instruction is called with it (:class:`autopar.runtime.execute.section_source.Source`)."""
    if isinstance(arg, Value):
        return next(operands)
    if isinstance(arg, (tuple, list)):
        return [_argument(each, operands) for each in arg]
    if isinstance(arg, sympy.Expr):
        return int(arg) if arg.is_integer else float(arg)
    return META if isinstance(arg, torch.device) else arg


def _key(args: Sequence[Arg]) -> Hashable:
    """Arguments without the names of values, in a form in which 1, 1.0 and True differ."""
    # Most are of these kinds: an instruction of a deep step is described in one walk.
    return tuple(
        [None if type(arg) is Value else (type(arg), arg) if type(arg) in _PLAIN else _of(arg) for arg in args]
    )


def _of(arg: Arg) -> Hashable:
    if isinstance(arg, (tuple, list)):
        return tuple, _key(arg)
    return (type(arg), repr(arg)) if isinstance(arg, float) else (type(arg), arg)
