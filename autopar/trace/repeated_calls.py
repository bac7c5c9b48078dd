"""Records calls of equal layers without running them, once two of them have been seen to run the same.

A model of a hundred equal layers takes long to run even on tensors without values, since every size is an expression.
What a layer runs is a function of its code, of the Python values that the code reads, and of the tensors that it gets.
So a call of an element of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` is not run if

- an earlier call was of a module that is alike (:mod:`.alike_modules`), with equal arguments, in the same modes;
- another call that is alike has run and has recorded exactly what the earlier one did, apart from the tensors;
- its operations use no tensor but its own parameters and buffers, its arguments, and what it computes;
- its operations write to no memory but their own, and its results share none with anything else.

Then its operations are those of the earlier call, with other tensors, and its results are new tensors of the same kind.
What cannot be seen from outside a call is what its code changes in Python: a counter, a list. If anything has changed
when the model has run (:func:`has_changed_python`), the model runs once more with every call, and so does a model whose
shortened run raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from autopar.torch_internals.fake_tensors import FakeTensor
from autopar.torch_internals.joint_graphs import notes
from autopar.torch_internals.modes import function_modes
from autopar.torch_internals.operators import is_mutable
from autopar.torch_internals.tensors import storage_key
from autopar.trace.guards.reads import Reads
from autopar.trace.guards.values import PLAIN

from .alike_modules import (
    Parts,
    corresponding_parts,
    corresponding_tensors,
    elements_of_lists,
    has_equal_attributes,
    read_alike,
)
from .outline import plain, tensor_kind, written_by
from .record import PATH, RecordedOp, Recorder, Ref, Region, replaced

# Fewer operations are run: chosen, not measured.
WORTHWHILE = 24
# Templates that are kept for a class of modules: the kinds of layers that alternate. Chosen, not measured.
KINDS = 8


class _UnlikeError(Exception):
    """A call that must run."""


@dataclass
class _Template:
    """A recorded call: its module, the tensors that it was given (``own``: its state, then its arguments), everything
    else that it was given (``around``), its region, and its results as a tree with :class:`Ref` for tensors.
    ``is_proven``: whether another call has recorded the same."""

    module: nn.Module
    path: str
    arguments: tuple[int, ...]
    around: object
    region: Region
    numbers: range
    results: Any
    is_proven: bool = False


class _Match(NamedTuple):
    """How a call is like an earlier one: the parts of the modules that correspond, and for each tensor that the earlier
    call was given the one that takes its place, by number."""

    parts: Parts
    mapping: Mapping[int, int]


@dataclass
class RepeatedCalls:
    """The calls that ``recorder`` need not run. ``skipped``: how many those were."""

    recorder: Recorder
    reads: Reads
    paths: dict[int, str]
    skipped: int = 0
    _layers: frozenset[int] = field(default_factory=frozenset)
    _templates: dict[type, list[_Template]] = field(default_factory=dict)

    @contextmanager
    def skipping(self, model: nn.Module) -> Iterator[None]:
        """Replaces calls inside the ``with`` block that need not run."""
        self._layers = elements_of_lists(model)
        call = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._layers or id(module) not in self.paths:
                return call(module, *args, **kwargs)
            return self._called(call, module, args, kwargs)

        with patch.object(nn.Module, "__call__", called):
            yield

    def _called(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            numbers, around = self._given(args, kwargs)
        except _UnlikeError:
            return call(module, *args, **kwargs)
        known = self._templates.setdefault(type(module), [])
        found = ((each, self._match(each, module, numbers, around)) for each in known)
        alike, match = next(((each, match) for each, match in found if match is not None), (None, None))
        if alike is not None and match is not None and alike.is_proven:
            return self._skip(alike, module, numbers, match)
        start, first = len(self.recorder.instructions), len(self.recorder.tensors)
        output = call(module, *args, **kwargs)
        region = self.recorder.last_region
        if region is None or (region.start, region.end) != (start, len(self.recorder.instructions)):
            return output
        if alike is not None:
            alike.is_proven = self._is_repeated(alike, module, numbers, region, first)
            if not alike.is_proven:
                known.remove(alike)
        elif len(known) < KINDS:
            made = range(first, len(self.recorder.tensors))
            template = _Template(module, self.paths[id(module)], numbers, around, region, made, None)
            self._add(known, template, output)
        return output

    def _add(self, known: list[_Template], template: _Template, output: Any) -> None:
        """Adds a template if calls like it can be recorded without running them."""
        try:
            template.results = self._results(template, output)
            self._check(template)
        except _UnlikeError:
            return
        known.append(template)

    def _given(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[int, ...], object]:
        """The numbers of the tensors among the arguments, and everything else that a call depends on besides its
        module. Raises :class:`_UnlikeError` for arguments that cannot be compared."""
        recorder, tensors = self.recorder, list[torch.Tensor]()

        def shape(arg: Any) -> object:
            if isinstance(arg, torch.Tensor):
                if id(arg) not in recorder.numbers or type(arg) not in (FakeTensor, nn.Parameter):
                    raise _UnlikeError
                tensors.append(arg)
                return torch.Tensor, recorder.numbers[id(arg)] in recorder.constants
            if type(arg) in (tuple, list):
                return type(arg), tuple(map(shape, arg))
            if type(arg) is dict:
                return dict, tuple((key, shape(value)) for key, value in arg.items())
            if isinstance(arg, (*PLAIN, torch.SymInt)):
                return plain(arg)
            raise _UnlikeError

        shapes = shape(args), shape(kwargs)
        numbers = tuple(recorder.numbers[id(tensor)] for tensor in tensors)
        memories = [storage_key(tensor.untyped_storage()) for tensor in tensors]
        device = torch.device("cpu").type
        around = (
            shapes,
            tuple(map(tensor_kind, tensors)),
            tuple(memories.index(memory) for memory in memories),
            tuple(numbers.index(number) for number in numbers),
            torch.is_grad_enabled(),
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
            tuple(function_modes()),
            repr({key: note for key, note in (notes() or {}).items() if key != PATH}),
        )
        return numbers, around

    def _match(self, template: _Template, module: nn.Module, numbers: tuple[int, ...], around: object) -> _Match | None:
        """How a call is like that of ``template``; None if it is not."""
        if template.around != around:
            return None
        parts = corresponding_parts(template.module, module)
        if parts is None or not has_equal_attributes(parts, self.reads):
            return None
        mapping = self._mapping(template, parts, numbers)
        return None if mapping is None else _Match(parts, mapping)

    def _mapping(self, template: _Template, parts: Parts, numbers: tuple[int, ...]) -> dict[int, int] | None:
        """For each tensor that the earlier call was given the one that takes its place; None if there is none."""
        pairs = corresponding_tensors(parts)
        if pairs is None:
            return None
        mapping: dict[int, int] = {}
        known, given = self.recorder.numbers, list(zip(template.arguments, numbers, strict=True))
        for x, y in pairs:
            if id(x) not in known or id(y) not in known or tensor_kind(x) != tensor_kind(y):
                return None
            given.append((known[id(x)], known[id(y)]))
        for old, new in given:
            if mapping.setdefault(old, new) != new:
                return None
        # Two tensors that are one for the earlier call are one for this call, and the other way around.
        return mapping if len(set(mapping.values())) == len(mapping) else None

    def _results(self, template: _Template, output: Any) -> Any:
        """The results with their numbers. Raises :class:`_UnlikeError` for what cannot be made anew."""
        recorder = self.recorder

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                number = recorder.numbers.get(id(value))
                is_known = number is not None and (number in template.numbers or number in template.arguments)
                if not is_known or type(value) is not FakeTensor:
                    raise _UnlikeError
                return Ref(number)  # type: ignore[arg-type]
            if type(value) in (tuple, list):
                return type(value)(map(leaf, value))
            if type(value) is dict:
                return {key: leaf(each) for key, each in value.items()}
            if isinstance(value, PLAIN):
                return value
            raise _UnlikeError

        return leaf(output)

    def _check(self, template: _Template) -> None:
        """Raises :class:`_UnlikeError` unless the call depends on nothing but its module and arguments, and changes
        nothing; see the module docstring."""
        recorder, region = self.recorder, template.region
        instructions = recorder.instructions[region.start : region.end]
        own = corresponding_tensors(corresponding_parts(template.module, template.module) or ())
        given = {*template.arguments, *(recorder.numbers.get(id(tensor), -1) for tensor, _ in own or ())}
        if own is None or len(instructions) < WORTHWHILE:
            raise _UnlikeError
        for step in instructions:
            is_inside = step.path is not None and f"{step.path}.".startswith(f"{template.path}.")
            is_known = all(number in given or number in template.numbers for number in step.operands)
            if not is_inside or not is_known or (is_mutable(step.op) and not self._writes_own(template, step, given)):
                raise _UnlikeError
        made = [ref.number for ref in _refs(template.results) if ref.number in template.numbers]
        memory_of = {n: storage_key(recorder.tensors[n].untyped_storage()) for n in (*made, *given) if n >= 0}
        memories = [memory_of[n] for n in dict.fromkeys(made)]
        if len(set(memories)) < len(memories) or {memory_of[n] for n in given if n >= 0} & set(memories):
            raise _UnlikeError
        if any(recorder.tensors[n].requires_grad and not recorder.tensors[n].is_contiguous() for n in made):
            raise _UnlikeError  # Copies of it might have other strides.

    def _writes_own(self, template: _Template, step: RecordedOp, given: set[int]) -> bool:
        """Whether a step writes to what the call itself made, in memory of its own: the sum within a norm, to which a
        constant is added, or the weights of chosen experts, divided by their sum."""
        tensors, written = self.recorder.tensors, written_by(step)
        foreign = {storage_key(tensors[n].untyped_storage()) for n in given if n >= 0}
        memories = {storage_key(tensors[n].untyped_storage()) for n in written}
        is_own = all(n in template.numbers for n in written) and not memories & foreign
        # No views of it: copies could not share its memory.
        kinds = {tensor_kind(tensors[n]) for n in self._sharing(template, memories)}
        return is_own and len(memories) == 1 == len(kinds)

    def _sharing(self, template: _Template, memories: set[int]) -> list[int]:
        """The numbers of the tensors of a call that lie in some memories."""
        tensors = self.recorder.tensors
        return [n for n in template.numbers if storage_key(tensors[n].untyped_storage()) in memories]

    def _with_memory_of_its_own(self, template: _Template, first: int) -> None:
        """Gives what a call that is not run writes to memory of its own: it would seem that both calls write to the
        same. ``first``: the number of its first new tensor."""
        recorder, region = self.recorder, template.region
        steps = recorder.instructions[region.start : region.end]
        written = [number for step in steps for number in written_by(step)]
        for memory in {storage_key(recorder.tensors[n].untyped_storage()) for n in written}:
            own: torch.Tensor | None = None
            for old in self._sharing(template, {memory}):
                number = first + template.numbers.index(old)
                own = recorder.stand_in(recorder.tensors[old], number) if own is None else own
                recorder.tensors[number] = own

    def _renamed(
        self, template: _Template, module: nn.Module, mapping: Mapping[int, int], first: int
    ) -> list[RecordedOp]:
        """The operations of a call like that of ``template``, whose first new tensor has the number ``first``."""
        mapping = {**mapping, **{old: first + position for position, old in enumerate(template.numbers)}}
        path, old_path, region = self.paths[id(module)], len(template.path), template.region

        def ref(old: Ref) -> Ref:
            return Ref(mapping[old.number])

        return [
            replace(
                step,
                args=replaced(step.args, Ref, ref),
                kwargs={name: replaced(arg, Ref, ref) for name, arg in step.kwargs.items()},
                operands=tuple(mapping[n] for n in step.operands),
                results=tuple(None if n is None else mapping[n] for n in step.results),
                path=path + (step.path or "")[old_path:],
            )
            for step in self.recorder.instructions[region.start : region.end]
        ]

    def _is_repeated(
        self, template: _Template, module: nn.Module, numbers: tuple[int, ...], region: Region, first: int
    ) -> bool:
        """Whether a call that has run recorded what it would have recorded without running."""
        recorder = self.recorder
        if len(recorder.tensors) - first != len(template.numbers):
            return False
        parts = corresponding_parts(template.module, module)
        mapping = None if parts is None else self._mapping(template, parts, numbers)
        assert mapping is not None
        expected = self._renamed(template, module, mapping, first)
        seen = recorder.instructions[region.start : region.end]
        kinds = (
            tensor_kind(recorder.tensors[old]) == tensor_kind(recorder.tensors[first + position])
            for position, old in enumerate(template.numbers)
        )
        return len(seen) == len(expected) and all(map(_is_same, expected, seen)) and all(kinds)

    def _skip(self, template: _Template, module: nn.Module, numbers: tuple[int, ...], match: _Match) -> Any:
        """Records a call without running it, and returns its results."""
        recorder, first, start = self.recorder, len(self.recorder.tensors), len(self.recorder.instructions)
        recorder.instructions += self._renamed(template, module, match.mapping, first)
        recorder.tensors += [recorder.tensors[n] for n in template.numbers]
        self._with_memory_of_its_own(template, first)
        recorder.add_region(module, _moved(template.region, start - template.region.start))
        read_alike(match.parts, self.reads)
        given = dict(zip(template.arguments, numbers, strict=True))
        made: dict[int, torch.Tensor] = {}

        def result(ref: Ref) -> torch.Tensor:
            if ref.number in given:
                return recorder.tensors[given[ref.number]]
            if ref.number not in made:
                number = first + template.numbers.index(ref.number)
                made[ref.number] = recorder.stand_in(recorder.tensors[ref.number], number)
            return made[ref.number]

        self.skipped += 1
        return _tree(template.results, result)


def _refs(tree: Any) -> Iterator[Ref]:
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _refs(each)


def _tree(tree: Any, result: Callable[[Ref], torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        return {key: _tree(value, result) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_tree(each, result) for each in tree)
    return result(tree) if isinstance(tree, Ref) else tree


def _moved(region: Region, distance: int) -> Region:
    children = [_moved(child, distance) for child in region.children]
    return Region(region.start + distance, region.end + distance, children)


def _is_same(first: RecordedOp, second: RecordedOp) -> bool:
    """Whether two operations are equal: operator, arguments and tensors."""

    def described(step: RecordedOp) -> object:
        arguments = plain((step.args, tuple(sorted(step.kwargs.items()))))
        return step.op, arguments, step.operands, step.results, step.requires_grad, step.grad_mode, step.path

    return described(first) == described(second)


def has_changed_python(reads: Reads, counted: Sequence[str], refilled: Sequence[str]) -> bool:
    """Whether a call of the model has changed anything in Python that it reads, as far as that is watched: numbers
    (``counted``) and containers (``refilled``) of its modules, attributes, variables, generators of random numbers."""
    return any((counted, refilled, reads.before.rewritten, reads.written, reads.generators.drawn))
