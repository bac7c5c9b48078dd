"""The lowered program of one rank: straight-line local operations and collectives, nothing left to decide.

Operations are named as in the graph (``aten.mm.default``, run as they are), ``autopar.*`` (see
:mod:`autopar.ops.masked`) or ``collective.*``:

=========================================== =========================================================================
``collective.all_reduce(x, axes, op)``        P(op) -> R
``collective.all_gather(x, axes, dim, size, before)``  S(dim/before) -> R; ``size`` is the length of ``dim`` afterwards
``collective.reduce_scatter(x, axes, op, dim, before)``  P(op) -> S(dim/before)
``collective.all_to_all(x, axes, gather_dim, gather_size, gather_before, scatter_dim, scatter_before)``
``collective.wait(handle)``                   the tensor of a collective started before
``collective.slice(x, axes, dim, before)``    R -> S, no communication
``host.store(x)``                             a copy of a saved activation in host memory
``host.fetch(copy)``                          starts to read it back; ``collective.wait`` gives the tensor
``collective.partial(x, axes)``               R -> P(sum): zero except on the first device of the axes
=========================================== =========================================================================

The four communicating ones start asynchronously and return a handle; every handle is awaited exactly once. Each has a
bucketed form, ``collective.all_reduce_bucket([x, y, ...], axes, op)`` and
``collective.reduce_scatter_bucket`` / ``all_gather_bucket`` with lists of dims, which ``collective.wait`` turns into as
many results. ``before`` is counted on the device (see :func:`autopar.ir.placements.local_before`); uneven shards are
padded by the runtime to the largest. Pieces in unequal shares have ``shares`` as well (all-to-all: ``gather_shares``,
``scatter_shares``), and no bucketed form. ``axes`` are mesh axes, outermost first: the devices that differ only there,
in row-major order.

Text forms: ``str`` shows what runs; :meth:`Program.to_text` also says what goes in and comes out, and which module an
instruction belongs to, and :meth:`Program.from_text` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch

from autopar.errors import GraphError
from autopar.torch_internals.operators import OpOverload, schema_of

from .graph_text import print_arg, text_lines
from .node import Arg, Value, map_arg, operands_of
from .placements import Placements
from .program_text import GROUPS, InstructionParts, SectionParts, parse_program, parse_sections, print_slot

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@cache
def _overload(op: str) -> OpOverload | None:
    """The torch operation of that name; None if there is none."""
    operator: Any = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part, None)
    return operator if isinstance(operator, OpOverload) else None


def is_random(op: str) -> bool:
    """Whether the torch operation ``op`` takes numbers from the generator. Its instructions keep their order, since all
    ranks draw what one device would."""
    overload = _overload(op)
    return overload is not None and torch.Tag.nondeterministic_seeded in overload.tags


@dataclass(frozen=True, slots=True)
class Instruction:
    """``results = op(*args, **kwargs)``; arguments as in :class:`autopar.ir.node.Node`, values refer to
    ``Value(result name)`` of one-result instructions or ``Value(first result name, index)`` of several."""

    name: str
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    results: int = 1
    module: str = ""
    _operands: tuple[Value, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @staticmethod
    def of(parts: InstructionParts) -> Instruction:
        """The instruction that was read from text."""
        return Instruction(*parts)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values it reads, those of keyword arguments included, repeats too; found once, since passes ask often."""
        found = self._operands
        if found is None:
            found = operands_of(self.args, self.kwargs)
            object.__setattr__(self, "_operands", found)
        return found

    def with_values(self, names: Mapping[Value, Value]) -> Instruction:
        """The instruction with other names for the values it reads."""

        def leaf(arg: Arg) -> Arg:
            return names.get(arg, arg) if isinstance(arg, Value) else arg

        kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in self.kwargs)
        return replace(self, args=map_arg(self.args, leaf), kwargs=kwargs)

    def __str__(self) -> str:
        names = ", ".join(str(Value(self.name, i)) for i in range(self.results))
        args = [print_arg(a) for a in self.args] + [f"{k}={print_arg(a)}" for k, a in self.kwargs]
        return f"{names} = {self.op}({', '.join(args)})"


def draws_numbers(instruction: Instruction) -> bool:
    """Whether ``instruction`` takes numbers from the generator: a random operation, unless it is an attention told to
    drop nothing (``dropout_p`` is 0)."""
    operation = _overload(instruction.op)
    if operation is None or not is_random(instruction.op):
        return False
    kwargs = dict(instruction.kwargs)
    for position, argument in enumerate(schema_of(operation).arguments):
        if argument.name == "dropout_p":
            default = instruction.args[position] if position < len(instruction.args) else argument.default_value
            return kwargs.get("dropout_p", default) != 0
    return True


@dataclass(frozen=True)
class Section:
    """A function of the program: ``inputs`` by name, ``outputs`` in order (None where there is none)."""

    name: str
    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Value | None, ...]

    def __str__(self) -> str:
        return self.to_text(modules=False)

    def to_text(self, modules: bool = True) -> str:
        """The text form, which :meth:`from_text` reads, with the ``modules`` that instructions belong to."""
        head = f"{self.name}({', '.join('%' + name for name in self.inputs)}):"
        tail = f"  return {', '.join('none' if v is None else str(v) for v in self.outputs)}".rstrip()
        ends = (f"  @{i.module}" if modules and i.module else "" for i in self.instructions)
        return "\n".join([head, *(f"  {i}{end}" for i, end in zip(self.instructions, ends, strict=True)), tail])

    @staticmethod
    def from_text(text: str) -> Section:
        """The section that :meth:`to_text` printed. Raises :class:`GraphError` naming the line."""
        sections = parse_sections(text_lines(text))
        if len(sections) != 1:
            raise GraphError(f"{len(sections)} sections where one was expected")
        return Section.of(sections[0])

    @staticmethod
    def of(parts: SectionParts) -> Section:
        """The section that was read from text."""
        return Section(parts.name, parts.inputs, tuple(map(Instruction.of, parts.instructions)), parts.outputs)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A placeholder or result of the program: which tensor (``kind`` as in the graph: param, buffer, input, tangent,
    constant, output, gradient, mutation, input_gradient; ``target``: path, input name or output index) and its
    placements on the mesh."""

    name: str
    kind: str
    target: str
    shape: tuple[int, ...]
    placements: Placements
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Program:
    """What the rank at ``coordinate`` of the mesh runs for one step.

    ``parameters`` says how each parameter is *stored*: the DTensor that the user and the optimizer see, whose gradient
    has the same placements. Some are used in another placement for the whole step (their optimizer state is sharded,
    the weight is not: ZeRO-1 and 2): ``refresh`` takes the stored local tensors of all parameters and returns the
    working ones; it has to run only after stored values change. (A weight gathered at each use, ZeRO-3, is gathered
    inside ``forward`` and ``backward``.)

    ``forward`` takes ``placeholders`` (params as working tensors, buffers, inputs, constants) in order and returns
    ``results`` (model outputs and buffer mutations), then the values saved for backward. ``backward`` takes the saved
    values, then one gradient per entry of ``tangents``, placed as that says, and returns one local tensor per entry of
    ``gradients`` (None: the parameter or input has no gradient), placed as stored. A forward-only program has an empty
    ``backward``.
    """

    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    parameters: tuple[TensorSlot, ...]
    placeholders: tuple[TensorSlot, ...]
    results: tuple[TensorSlot, ...]
    tangents: tuple[TensorSlot, ...]
    gradients: tuple[TensorSlot, ...]
    refresh: Section
    forward: Section
    backward: Section
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def draws(self) -> bool:
        """Whether it takes a random state."""
        return any(slot.kind == "random" for slot in self.placeholders)

    @property
    def sections(self) -> tuple[Section, Section, Section]:
        return self.refresh, self.forward, self.backward

    def __str__(self) -> str:
        head = f"# rank at {self.coordinate} of mesh {self.mesh}"
        return "\n".join([head, *map(str, self.sections)]) + "\n"

    def to_text(self) -> str:
        """The text form, which :meth:`from_text` reads; constants print by name only."""
        slots = (print_slot(word, slot) for field, word in GROUPS.items() for slot in getattr(self, field))
        head = f"# rank at {self.coordinate} of mesh {self.mesh}"
        return "\n".join([head, *slots, *(section.to_text() for section in self.sections)]) + "\n"

    @staticmethod
    def from_text(text: str) -> Program:
        """The program that :meth:`to_text` printed, or ``str``, which leaves out slots and modules. Raises
        :class:`GraphError` naming the line."""
        parts = parse_program(text)
        fields: dict[str, Any] = {
            **{field: tuple(TensorSlot(*slot) for slot in slots) for field, slots in parts.slots.items()},
            **{name: Section.of(section) for name, section in parts.sections.items()},
        }
        return Program(parts.mesh, parts.coordinate, **fields)
