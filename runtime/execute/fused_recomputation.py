"""Saves for backward only what fused code has to store anyway.

A derivative often needs several steps of an elementwise function: of GELU the product, the tanh and the sum. Run one
by one, each of them is a tensor that may as well be saved. In compiled code they are never stored, unless they
are saved: then forward writes all of them and backward reads them. It is cheaper to compute them again, from
values that are stored in any case. Plans for compiled steps say so themselves
(:mod:`autopar.passes.recompute.compute_again`); any other counts the saved values as they were: memory is at most what
it predicts.

Random draws are such steps, too: their numbers are a function of the state of the step, which takes 32 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from autopar.ir.module_paths import layers_among, outermost_layer
from autopar.ir.node import CAST, Value, fresh_name
from autopar.ir.program import Instruction, Program, Section
from autopar.ops.random_streams import STREAMED

from .piece_lookups import LOOKUPS
from .pieces import kind_of
from .torch_operations import resolve_aten

# Steps that are computed again for one value.
# Chosen: an activation function has about ten; not measured.
_MOST_STEPS = 16
# Elementwise too, though torch has no such tag for them; what makes a constant costs nothing.
_ELEMENTWISE = ("aten.full.default", "aten.scalar_tensor.default", "aten.clone.default")

# Their results are small beside what they reduce.
_REDUCTIONS = frozenset((
    "aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim", "aten.amax.default",
    "aten.amin.default", "aten.prod.dim_int",
))  # fmt: skip
# Views with all elements of what they view: a slice may be small where its base is not.
_WHOLE_VIEWS = frozenset(("aten.reshape.default", "aten.permute.default", "aten.expand.default"))


def recomputed_in_backward(program: Program) -> Program:
    """``program``, saving fewer values; see the module docstring."""
    count = len(program.results)
    saved = [value for value in program.forward.outputs[count:] if value is not None]
    if not program.backward.instructions or len(saved) != len(program.forward.outputs) - count:
        return program
    forward = _Forward(program.forward, saved)
    position = {i.name: index for index, i in enumerate(program.forward.instructions)}
    for value in sorted(set(saved), key=lambda v: position.get(v.node, -1), reverse=True):
        forward.try_to_drop(value)
    if not forward.dropped:
        return program
    kept = [*dict.fromkeys(value for value in saved if value in forward.kept), *forward.added]
    outputs = (*program.forward.outputs[:count], *kept)
    backward = _with_steps(program.backward, saved, kept, forward)
    return replace(program, forward=replace(program.forward, outputs=outputs), backward=backward)


class _Forward:
    """``kept``: the saved values so far; ``added``: those of them that were not saved before; ``dropped``: those that
    backward computes."""

    def __init__(self, section: Section, saved: list[Value]) -> None:
        self.made = {i.name: i for i in section.instructions}
        self.kept, self.added, self.dropped = set(saved), [], set()  # type: ignore[var-annotated]
        self._inputs = {Value(name) for name in section.inputs}
        self._layers = layers_among({i.module for i in section.instructions})
        self._readers: dict[Value, list[Instruction]] = {}
        for instruction in section.instructions:
            for value in instruction.operands:
                self._readers.setdefault(value, []).append(instruction)

    def try_to_drop(self, value: Value) -> None:
        made = self.made.get(value.node)
        if made is None or not _is_elementwise(made) or not self._is_only_fused(value, made):
            return
        cone = self._cone(made)
        if cone is None:
            return
        self.kept.discard(value)
        self.dropped.add(value)
        new = [base for base in cone if base not in self.kept]
        self.kept.update(new)
        self.added += new

    def _is_only_fused(self, value: Value, made: Instruction) -> bool:
        """Whether fused code alone reads the value in forward, so that it is not stored unless it is saved."""
        for reader in self._readers.get(value, ()):
            kind = kind_of(reader)
            is_cast = made.op in STREAMED and reader.op == CAST
            fuses = _is_elementwise(reader) or is_cast or kind == "view" or reader.op in LOOKUPS
            if not fuses or self._layer(reader) != self._layer(made):
                return False
            parts = [Value(reader.name, index) for index in range(reader.results)] if kind == "view" else []
            if not all(self._is_only_fused(part, made) for part in parts):
                return False
        return True

    def _layer(self, instruction: Instruction) -> str:
        return outermost_layer(instruction.module, self._layers)

    def _cone(self, made: Instruction) -> list[Value] | None:
        """The values from which ``made`` can be computed by elementwise steps of its layer; None if they would take
        more memory than it."""
        bases: dict[Value, None] = {}
        steps, open_values = {made.name}, list(made.operands)
        while open_values:
            value = open_values.pop()
            source = self.made.get(value.node)
            if value in self.kept or value in self._inputs:
                bases[value] = None
            elif source is None or len(steps) > _MOST_STEPS:
                return None
            elif self._layer(source) != self._layer(made) or not _is_step(source):
                bases[value] = None
            elif source.name not in steps:
                steps.add(source.name)
                open_values += source.operands
        return list(bases) if self._fits(bases, steps) else None

    def _fits(self, bases: Mapping[Value, None], steps: set[str]) -> bool:
        """Whether the new ``bases`` take no more memory than the result of the ``steps``: results of reductions, and
        at most one of a kernel, which is stored anyway and no larger than what is computed from it."""
        new = [self.made[base.node] for base in bases if base not in self.kept and base not in self._inputs]
        if any(each.results > 1 or not (kind_of(each) == "kernel" or _is_fusable(each)) for each in new):
            return False
        kernels = sum(kind_of(each) == "kernel" for each in new)
        converts = any(self.made[step].op == CAST for step in steps)
        elementwise = any(_is_elementwise(each) for each in new)
        draws = any(self.made[step].op in STREAMED for step in steps)
        if not draws and all(base in self._inputs or self._is_reduced(base) for base in bases):
            return False  # A small value, such as the scale of a norm.
        return not elementwise and kernels <= 1 and not (kernels and converts)

    def _is_reduced(self, value: Value) -> bool:
        made = self.made.get(value.node)
        return made is not None and made.op in _REDUCTIONS

    def steps_to(self, value: Value) -> Iterator[Instruction]:
        """The instructions that compute a dropped value from kept ones, in order."""
        seen: set[str] = set()
        waiting = [(self.made[value.node], False)]
        while waiting:
            made, ready = waiting.pop()
            if ready:
                yield made
            elif made.name not in seen:
                seen.add(made.name)
                operands = (v for v in made.operands if v not in self.kept and v not in self._inputs)
                waiting += [(made, True), *((self.made[v.node], False) for v in operands)]


def _is_elementwise(instruction: Instruction) -> bool:
    """One result, each element of which is computed from one element of each operand, or drawn."""
    if instruction.op in STREAMED:
        return True
    if kind_of(instruction) != "fused" or not instruction.op.startswith("aten.") or instruction.results > 1:
        return False
    return instruction.op in _ELEMENTWISE or torch.Tag.pointwise in resolve_aten(instruction.op).tags


def _is_fusable(instruction: Instruction) -> bool:
    return _is_elementwise(instruction) or instruction.op in _REDUCTIONS


def _is_step(instruction: Instruction) -> bool:
    return _is_elementwise(instruction) or instruction.op in (*_WHOLE_VIEWS, CAST)


def _with_steps(backward: Section, saved: list[Value], kept: list[Value], forward: _Forward) -> Section:
    """``backward``, which takes the ``kept`` values in place of the ``saved`` ones, and computes the others before they
    are first read."""
    taken = {*backward.inputs, *(i.name for i in backward.instructions)}
    inputs = dict(reversed(list(zip(saved, backward.inputs, strict=False))))
    read_as: dict[Value, list[str]] = {}
    for value, name in zip(saved, backward.inputs, strict=False):
        read_as.setdefault(value, []).append(name)
    known = {value: Value(inputs.get(value) or fresh_name(f"{value.node}_kept", taken)) for value in kept}
    late: dict[Value, Value] = {Value(n): value for value, each in read_as.items() for n in each}
    done: list[Instruction] = []
    renamed = {Value(n): known[value] for value, each in read_as.items() if value in known for n in each}
    views: dict[str, Instruction] = {}

    def compute(values: Iterable[Value]) -> None:
        for value in values:
            if value.node in views:
                view = views.pop(value.node)
                compute(view.operands)
                done.append(view.with_values(renamed))
            elif value in late and value not in renamed:
                done.extend(_computed(late[value], forward, known, taken))
                renamed.update({Value(n): known[late[value]] for n in read_as[late[value]]})

    for instruction in backward.instructions:
        operands = instruction.operands
        waits = any((v in late and v not in renamed) or v.node in views for v in operands)
        if waits and kind_of(instruction) == "view":
            views[instruction.name] = instruction  # Computed where it is read.
            continue
        compute(operands)
        done.append(instruction.with_values(renamed))
    compute([value for value in backward.outputs if value is not None])
    outputs = tuple(None if value is None else renamed.get(value, value) for value in backward.outputs)
    rest = backward.inputs[len(saved) :]
    return Section(backward.name, (*(known[value].node for value in kept), *rest), tuple(done), outputs)


def _computed(value: Value, forward: _Forward, known: dict[Value, Value], taken: set[str]) -> Iterator[Instruction]:
    for step in forward.steps_to(value):
        if Value(step.name) in known:
            continue
        name = fresh_name(f"{step.name}_fused", taken)
        yield replace(step, name=name).with_values(known)
        known.update({Value(step.name, n): Value(name, n) for n in range(step.results)})
