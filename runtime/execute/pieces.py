"""Splits a section into pieces that a compiler of graphs can fuse, and all that runs as it is.

A piece is a run of operations on this rank's tensors inside one repeated block of the model, or in several blocks that
have no equal: there nothing is gained by ending it, and sums at a block's end fuse with what follows. Collectives begin
and end where they did, since overlap was priced so. What reads values on the host (some draws, operations of other
libraries) moves in front of the piece if it takes nothing from it, and ends the piece otherwise. A look-up that checks
its indices on the host is part of a piece, and what its indices are computed by moves in front of it. Gradients added
in place to those of earlier microbatches, which no operation reads, move behind the piece. Equal pieces, such as those
of a model's layers, get one canonical form, so that they are compiled once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import torch

from autopar.ir.module_paths import layers_among, outermost_layer
from autopar.ir.node import Value
from autopar.ir.program import Instruction, Section
from autopar.ops.random_streams import STREAMED
from autopar.torch_internals.operators import OpOverload, is_mutable

from .piece_lookups import LOOKUPS, indices_of
from .section_source import COMPILED
from .torch_operations import resolve_aten

# "fused": part of a piece, and cheaper fused. "kernel": part of a piece, but run by a kernel of its own.
# "view": part of a piece, costs nothing. "early": runs in front of the piece. "late": runs behind the piece.
# "lookup": fused, if its indices are inputs of the piece. "fixed": ends a piece.
Kind = Literal["fused", "kernel", "view", "lookup", "early", "late", "fixed"]

# In-place additions to the gradients of earlier microbatches (passes/lower/accumulate_gradients.py).
_SUMS = ("aten.add_.Tensor", "aten.addmm_.default")
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default", "view.default", "_unsafe_view.default", "permute.default", "expand.default", "slice.Tensor",
        "select.int", "split_with_sizes.default", "split.Tensor", "unsqueeze.default", "squeeze.dim", "squeeze.dims",
        "t.default", "transpose.int", "alias.default", "detach.default", "unbind.int", "diagonal.default",
    )
)  # fmt: skip
# Operations that Inductor gives to torch's own kernels.
_KERNELS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
)
# Operations of autopar that are functions of tensors alone, with kernels of their own.
_TRACED = (
    "autopar.attention.default",
    "autopar.attention_backward.default",
    "autopar.causal_attention",
    "autopar.causal_attention_backward",
)
# Writes of a rank's part of an indexed dim, without checks of the indices (autopar/ops/masked.py).
_MASKED = ("autopar.masked_scatter", "autopar.masked_scatter_value")
# Draws of a stream, which is a tensor (piece_draws.py).
_DRAWS = frozenset(STREAMED.values())
# Copies, if the layout of a tensor needs one.
_DENSE = ("autopar.dense", "autopar.dense_rows")


@dataclass(frozen=True)
class Piece:
    """``section``: the operations of a piece, with the names and modules of the program; ``canonical``: the same for
    all equal pieces."""

    section: Section
    canonical: Section


@dataclass(frozen=True)
class Split:
    """``section``, in which an instruction ``compiled.n`` calls the piece of its name."""

    section: Section
    pieces: Mapping[str, Piece]

    def __str__(self) -> str:
        unique = {i.op: self.pieces[i.name].canonical for i in self.section.instructions if i.name in self.pieces}
        return "\n".join([str(self.section), *map(str, unique.values())]) + "\n"


def kind_of(instruction: Instruction, guarded: Container[str] = ()) -> Kind:
    """How ``instruction`` may be compiled; ``guarded``: operations that check their indices on the host."""
    op = instruction.op
    if op in guarded:
        return "lookup" if op in LOOKUPS else "early"
    if op in _MASKED or op in _DRAWS:
        return "fused"
    if op.startswith(("collective.", "host.")):
        return "fixed"
    if op in _TRACED:
        return "kernel"
    if op in _DENSE:
        return "view"
    if op in _SUMS:
        return "late"
    if not op.startswith(("aten.", "prims.")):
        return "early"
    return _aten_kind(resolve_aten(op), op)


def _aten_kind(operation: OpOverload, op: str) -> Kind:
    if is_mutable(operation):
        return "fixed"
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    # Indices of a program are numbers, not truth values, so shapes are known.
    if op not in LOOKUPS and any(tag in operation.tags for tag in tags):
        return "early"
    return "view" if op in _VIEWS else "kernel" if op in _KERNELS else "fused"


def split(section: Section, kind: Callable[[Instruction], Kind] = kind_of) -> Split:
    """Splits ``section``; see the module docstring."""
    splitter = _split(section, kind, frozenset())
    if splitter.single:
        splitter = _split(section, kind, splitter.single)
    outputs = tuple(None if value is None else splitter.renamed.get(value, value) for value in section.outputs)
    return Split(replace(section, instructions=tuple(splitter.done), outputs=outputs), splitter.pieces)


def _split(section: Section, kind: Callable[[Instruction], Kind], joined: Set[str]) -> _Splitter:
    splitter = _Splitter(section, kind, joined)
    for instruction in section.instructions:
        splitter.add(instruction)
    splitter.flush()
    return splitter


class _Splitter:
    """``done``: the instructions so far; ``current`` and ``late``: the piece being collected, and what runs behind
    it. Between blocks that are both ``joined`` no piece ends."""

    def __init__(self, section: Section, kind: Callable[[Instruction], Kind], joined: Set[str]) -> None:
        self.done: list[Instruction] = []
        self.pieces: dict[str, Piece] = {}
        self.renamed: dict[Value, Value] = {}
        self._current: list[Instruction] = []
        self._late: list[Instruction] = []
        self._block = ""
        self._joined = joined
        self._found: list[tuple[str, int]] = []
        self._kind = kind
        self._prefix = _fresh_prefix(section)
        self._layers = layers_among({i.module for i in section.instructions})
        self._readers = _readers(section)
        self._numbers: dict[Section, int] = {}

    def add(self, instruction: Instruction) -> None:
        kind = self._kind(instruction)
        if kind == "fixed" or self._reads(instruction, self._late):
            self.flush()
        if kind == "fixed" or (kind == "late" and not self._current):
            self._emit(instruction)
        elif kind == "late":
            self._late.append(instruction)
        elif kind == "early":
            if self._reads(instruction, self._current):
                self.flush()
            self._emit(instruction)
        else:
            self._collect(instruction, kind)

    def _collect(self, instruction: Instruction, kind: Kind) -> None:
        block = outermost_layer(instruction.module, self._layers) if instruction.module else self._block
        if block != self._block and not {block, self._block} <= self._joined:
            self.flush()
        self._block = block
        if kind == "lookup":
            self._split_off({value.node for value in indices_of(instruction)})
        self._current.append(instruction)

    def _split_off(self, names: set[str]) -> None:
        """Moves the instructions of these ``names``, and those they read, in front of the current piece."""
        needed = []
        for instruction in reversed(self._current):
            if instruction.name in names:
                needed.append(instruction)
                names |= {value.node for value in instruction.operands}
        if needed:
            rest = [i for i in self._current if i.name not in names]
            self._current = needed[::-1]
            self._emit_current()
            self._current = rest

    @property
    def single(self) -> frozenset[str]:
        """The blocks none of whose pieces has an equal."""
        counts = Counter(number for _, number in self._found)
        repeated = {block for block, number in self._found if counts[number] > 1}
        return frozenset(block for block, _ in self._found) - repeated

    @staticmethod
    def _reads(instruction: Instruction, others: Sequence[Instruction]) -> bool:
        """Whether ``instruction`` reads a result of ``others``."""
        names = {value.node for value in instruction.operands}
        return any(other.name in names for other in others)

    def _emit(self, instruction: Instruction) -> None:
        self.done.append(instruction.with_values(self.renamed))

    def flush(self) -> None:
        """Ends the current piece."""
        self._emit_current()
        for instruction in self._late:
            self._emit(instruction)
        self._current, self._late = [], []

    def _emit_current(self) -> None:
        if self._fuses():
            self._emit_piece()
        else:
            for instruction in self._current:
                self._emit(instruction)

    def _fuses(self) -> bool:
        """Whether two operations of the current piece can share a pass over memory: one reads what the other makes, or
        both read the same."""
        base: dict[Value, Value] = {}
        read: set[Value] = set()
        made: set[str] = set()
        for instruction in self._current:
            kind, values = self._kind(instruction), {base.get(value, value) for value in instruction.operands}
            if kind == "view":
                base |= {Value(instruction.name, i): value for value in values for i in range(instruction.results)}
            elif kind in ("fused", "lookup"):
                if values & read or any(value.node in made for value in values):
                    return True
                read |= values
                made.add(instruction.name)
        return False

    def _emit_piece(self) -> None:
        name = f"{self._prefix}{len(self.pieces)}"
        operands, outputs = self._ends()
        if not outputs:
            return
        section = _piece_section(name, self._current, operands, outputs)
        canonical = _canonical(section)
        number = self._numbers.setdefault(canonical, len(self._numbers))
        self.pieces[name] = Piece(section, canonical)
        module = _common_module(self._current)
        self._found.append((self._block, number))
        self._emit(Instruction(name, f"{COMPILED}{number}", (operands,), (), len(outputs), module))
        self.renamed.update({value: Value(name, index) for index, value in enumerate(outputs)})

    def _ends(self) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """The values that the current piece takes, by first use, and those that others take from it."""
        names = {i.name for i in self._current}
        read = (value for i in self._current for value in i.operands if value.node not in names)
        results = (Value(i.name, index) for i in self._current for index in range(i.results))
        return tuple(dict.fromkeys(read)), tuple(v for v in results if self._readers.get(v, set()) - names)


def _common_module(instructions: Iterable[Instruction]) -> str:
    """The innermost module that all ``instructions`` with a module are in."""
    paths = [i.module.split(".") for i in instructions if i.module]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def _readers(section: Section) -> dict[Value, set[str]]:
    """The names of the instructions that read a value; "" for the end of the section."""
    readers: dict[Value, set[str]] = {value: {""} for value in section.outputs if value is not None}
    for instruction in section.instructions:
        for value in instruction.operands:
            readers.setdefault(value, set()).add(instruction.name)
    return readers


def _fresh_prefix(section: Section) -> str:
    taken = {*section.inputs, *(i.name for i in section.instructions)}
    prefix = f"{section.name}_piece_"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return prefix


def _piece_section(
    name: str, instructions: Sequence[Instruction], operands: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Section:
    taken = {i.name for i in instructions} | {value.node for value in operands}
    inputs: dict[Value, Value] = {}
    for value in operands:
        own = value.node if value.index == 0 else f"{value.node}_result{value.index}"
        while value.index and own in taken:
            own += "_"
        taken.add(own)
        inputs[value] = Value(own)
    body = tuple(i.with_values(inputs) for i in instructions)
    return Section(name, tuple(value.node for value in inputs.values()), body, outputs)


def _canonical(section: Section) -> Section:
    """``section`` with numbered names and without modules."""
    names = {name: f"a{position}" for position, name in enumerate(section.inputs)}
    names |= {i.name: f"v{position}" for position, i in enumerate(section.instructions)}
    values = {value: replace(value, node=names[value.node]) for value in _values(section)}
    body = (replace(i, name=names[i.name], module="").with_values(values) for i in section.instructions)
    outputs = tuple(None if value is None else values[value] for value in section.outputs)
    return Section("piece", tuple(names[name] for name in section.inputs), tuple(body), outputs)


def _values(section: Section) -> set[Value]:
    read = {value for i in section.instructions for value in i.operands}
    return read | {value for value in section.outputs if value is not None}
