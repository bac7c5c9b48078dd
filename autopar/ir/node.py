"""The parts of a :class:`~autopar.ir.graph.Graph`: tensor types, values, operations and outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from sys import intern
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import sympy
import torch

from autopar.errors import GraphError

Dim: TypeAlias = int | sympy.Expr
Phase = Literal["forward", "backward"]
OutputKind = Literal["output", "gradient", "input_gradient", "mutation", "send"]

PLACEHOLDERS = ("param", "buffer", "input", "tangent", "constant", "receive", "random", "cache")
_PLACEHOLDERS = frozenset(PLACEHOLDERS)
# The keyword of a parameter that is stored in another dtype than the graph reads (:attr:`Node.stored`).
STORED = "stored"
# The keyword of a parameter whose gradient is that of a scaled loss.
SCALED = "scaled"
# The identity operation that saves a value for backward (:mod:`autopar.passes.recompute.saved_values`).
SAVED_ACTIVATION = "autopar.saved"
# Its name in plans of format version 7.
SAVED_ACTIVATION_BEFORE = "autopar.rest"
# The suffix of the copy of a forward node that backward recomputes (:mod:`autopar.passes.recompute.recompute`).
RECOMPUTED = "_recomputed"
_COPY_FOR_CHUNK = re.compile(r"_at\d+(?=$|_)")
# The views of a normalised graph: they cost nothing to repeat and hold no memory of their own.
VIEWS = frozenset(("aten.reshape.default", "aten.permute.default", "aten.expand.default"))
# A copy in another dtype.
CAST = "aten._to_copy.default"

SHORT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "f64": torch.float64,
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f8e4m3": torch.float8_e4m3fn,
        "f8e5m2": torch.float8_e5m2,
        "i64": torch.int64,
        "i32": torch.int32,
        "i16": torch.int16,
        "i8": torch.int8,
        "u8": torch.uint8,
        "b8": torch.bool,
        "c64": torch.complex64,
        "c128": torch.complex128,
    }
)
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({v: k for k, v in SHORT_DTYPES.items()})


class TensorType(NamedTuple):
    """Shape (``int`` or sympy) and dtype of one tensor, both global. A tuple, as :class:`Value` is."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Dim:
        count: Dim = 1
        for size in self.shape:
            count = count * size
        return count

    @property
    def bytes(self) -> Dim:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return _type_text(self.shape, self.dtype)


# Graphs of many layers have few types, and sympy prints slowly.
@lru_cache(maxsize=1 << 12)
def _type_text(shape: tuple[Dim, ...], dtype: torch.dtype) -> str:
    return f"{DTYPE_NAMES[dtype]}[{', '.join(map(str, shape))}]"


class Value(NamedTuple):
    """Result ``index`` of the node called ``node``; prints as ``%node`` or ``%node.index``.

    A tuple, since values are keys wherever a graph is walked: it is made, hashed and compared without a call into
    Python. So code that goes through arguments asks whether one is a value before it asks whether it is a tuple."""

    node: str
    index: int = 0  # type: ignore[assignment]  # Instead of the method of tuples.

    def __str__(self) -> str:
        return f"%{self.node}" if self.index == 0 else f"%{self.node}.{self.index}"


# An argument is None, bool, int, float, str, sympy.Expr, Value, a torch dtype/device/layout/memory format,
# or a (nested) tuple of these.
Arg = Any


_LEAVES = frozenset((Value, int, float, bool, str, type(None), torch.dtype, torch.device))


def map_arg(arg: Arg, function: Callable[[Arg], Arg]) -> Arg:
    """``arg`` with ``function`` applied to every leaf; tuples keep their structure."""
    if isinstance(arg, (tuple, list)) and type(arg) is not Value:
        # Most items are leaves, whose own call of this function is saved.
        return tuple([function(item) if type(item) in _LEAVES else map_arg(item, function) for item in arg])
    return function(arg)


def replaced_values(args: Sequence[Arg], values: Mapping[Value, Value]) -> tuple[Arg, ...]:
    """``args`` with ``values`` in place of those that are their keys, all of those in ``args``."""
    return tuple(
        [
            values[arg]
            if type(arg) is Value
            else replaced_values(arg, values)
            if isinstance(arg, (tuple, list))
            else arg
            for arg in args
        ]
    )


def has_expression(arg: Arg) -> bool:
    """Whether a leaf of ``arg`` is an expression of sizes."""
    if isinstance(arg, (tuple, list)):  # A value has none: neither a name nor an index is one.
        return any(has_expression(item) for item in arg if type(item) not in _LEAVES)
    return isinstance(arg, sympy.Expr)


def operands_of(args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> tuple[Value, ...]:
    """The :class:`Value` leaves of the arguments of a call, in order, repeats included."""
    found: list[Value] = []
    _add_values(args, found)
    for _, arg in kwargs:
        _add_values((arg,), found)
    return tuple(found)


def values_in(arg: Arg) -> Iterator[Value]:
    """The :class:`Value` leaves of ``arg``, left to right."""
    found: list[Value] = []
    _add_values((arg,), found)
    return iter(found)


def _add_values(args: tuple[Arg, ...], found: list[Value]) -> None:
    for arg in args:
        if type(arg) is Value:
            found.append(arg)
        elif isinstance(arg, tuple):
            _add_values(arg, found)


def _numbered(args: Sequence[Arg], numbers: Mapping[Value, str]) -> str:
    """``args`` as text, with ``numbers`` in place of the names of values."""
    return ", ".join(
        [
            numbers[arg]
            if type(arg) is Value
            else f"({_numbered(arg, numbers)})"
            if isinstance(arg, (tuple, list))
            else expression_text(arg)
            if isinstance(arg, sympy.Expr)
            else repr(arg)
            for arg in args
        ]
    )


# Graphs of many layers have few expressions, and sympy prints slowly.
@lru_cache(maxsize=1 << 12, typed=True)
def expression_text(expression: sympy.Expr) -> str:
    """An expression of sizes as text."""
    return str(expression)


@dataclass(frozen=True, init=False)
class Node:
    """One operation. ``types`` has one entry per result; None where the operation returns no tensor there.

    ``op`` is an overload name (``aten.mm.default``), an autopar local operation (``autopar.masked_gather``) or one of
    :data:`PLACEHOLDERS`. ``module`` is the path of the module that called it, ``source`` is ``file:line``.
    """

    name: str
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    types: tuple[TensorType | None, ...] = ()
    module: str = ""
    source: str = field(default="", compare=False)
    phase: Phase = "forward"
    if TYPE_CHECKING:  # Of ``op``, and so no field: asked for often.
        is_placeholder: bool = False

    def __init__(
        self,
        name: str,
        op: str,
        args: tuple[Arg, ...] = (),
        kwargs: tuple[tuple[str, Arg], ...] = (),
        types: tuple[TensorType | None, ...] = (),
        module: str = "",
        source: str = "",
        phase: Phase = "forward",
    ) -> None:
        # What a dataclass would do, without a call for each field: a deep model's nodes are made by the hundred
        # thousand while its cuts are priced.
        own = self.__dict__
        own["name"], own["op"], own["args"], own["kwargs"] = name, op, args, kwargs
        own["types"], own["module"], own["source"], own["phase"] = types, module, source, phase
        own["is_placeholder"] = op in _PLACEHOLDERS

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """Tensor operands in order of appearance, repeats included: ``mul(%x, %x)`` has two."""
        return operands_of(self.args, self.kwargs)

    @cached_property
    def is_symbolic(self) -> bool:
        """Whether an argument or a type contains an expression of sizes."""
        types = any(has_expression(kind.shape) for kind in self.types if kind is not None)
        return types or has_expression(self.args) or any(has_expression(arg) for _, arg in self.kwargs)

    @cached_property
    def form(self) -> str:
        """The operation and its arguments as text, without the names of operands: equal for calls that differ only in
        which tensors they take. Which operands are the same tensor is part of it."""
        numbers = {value: f"%{number}" for number, value in enumerate(dict.fromkeys(self.operands))}
        given = [f"{key}={_numbered((arg,), numbers)}" for key, arg in self.kwargs] if self.kwargs else ()
        return intern(f"{self.op}({_numbered(self.args, numbers)}; {given})")

    @property
    def type(self) -> TensorType:
        """The type of the only (or first) result."""
        if not self.types or self.types[0] is None:
            raise GraphError(f"%{self.name} = {self.op} has no tensor result")
        return self.types[0]

    @property
    def stored(self) -> TensorType:
        """The type in which a parameter is stored and updated and has its gradient: its own, unless the graph reads a
        copy of fewer bits, made once a step: ``%w: bf16[4] = param("w", stored=torch.float32)``."""
        dtype: torch.dtype | None = dict(self.kwargs).get(STORED)
        return self.type if dtype is None else TensorType(self.type.shape, dtype)

    @property
    def is_scaled(self) -> bool:
        """Whether the gradient of a parameter is computed from a scaled loss: ``param("w", scaled=True)``."""
        return bool(dict(self.kwargs).get(SCALED, False))

    @property
    def target(self) -> str:
        """The fully qualified name of what a placeholder represents (parameter path, input name, ...)."""
        return str(self.args[0])

    @property
    def path(self) -> str:
        """Its path in the model: its module's, or for placeholders such as parameters their own."""
        return self.target if self.is_placeholder else self.module

    def map_values(self, function: Callable[[Value], Value]) -> Node:
        """The node with other operands; itself, if they stay the same."""
        operands = self.operands
        renamed = {value: function(value) for value in operands}
        if all(old is new or old == new for old, new in renamed.items()):
            return self
        args, kwargs = replaced_values(self.args, renamed), self.kwargs
        if kwargs:
            kwargs = tuple([(key, *replaced_values((arg,), renamed)) for key, arg in kwargs])
        node = Node(self.name, self.op, args, kwargs, self.types, self.module, self.source, self.phase)
        return node.known_from(self, len(set(renamed.values())) == len(renamed))

    def of_values(self, name: str, module: str, values: Mapping[Value, Value]) -> Node:
        """The same call of other tensors by another module: ``values``, by each of its operands."""
        _ = self.form, self.is_symbolic  # Known of all copies by then.
        args, kwargs = replaced_values(self.args, values), self.kwargs
        if kwargs:
            kwargs = tuple([(key, *replaced_values((arg,), values)) for key, arg in kwargs])
        node = Node(name, self.op, args, kwargs, self.types, module, self.source, self.phase)
        own = set(self.operands)
        return node.known_from(self, len({values[value] for value in own}) == len(own))

    def named(self, name: str, phase: Phase) -> Node:
        """The node with another name and phase."""
        return self._changed(name=name, phase=phase)

    def inside(self, module: str) -> Node:
        """The node called by another module."""
        return self._changed(module=module)

    def of_types(self, types: tuple[TensorType | None, ...]) -> Node:
        """The node with results of other types."""
        node = self._changed(types=types)
        vars(node).pop("is_symbolic", None)
        return node

    def _changed(self, **fields: Any) -> Node:
        """The node with other fields, on which nothing that is known of it depends."""
        node = Node.__new__(Node)
        vars(node).update(vars(self))
        vars(node).update(fields)
        return node

    def known_from(self, other: Node, is_same_form: bool) -> Node:
        """Itself, with what is known of ``other``, whose operands have other names: nodes are copied often.
        ``is_same_form``: whether operands that are one tensor there are one here, and no others."""
        known = vars(other)
        names = ("form", "is_symbolic") if is_same_form else ("is_symbolic",)
        vars(self).update((name, known[name]) for name in names if name in known)
        return self


@dataclass(frozen=True, slots=True)
class Output:
    """One result of the graph: a model ``output`` (``name`` is its index), the ``gradient`` of the parameter ``name``,
    the ``input_gradient`` of an input, the new value (``mutation``) of the buffer or cache ``name``, or the value
    ``name`` to ``send`` to other pipeline stages. ``value`` is None for a result that is None (a parameter without
    gradient)."""

    kind: OutputKind
    name: str
    value: Value | None


def fresh_name(name: str, taken: set[str], others: Container[str] = ()) -> str:
    """``name``, with underscores until it is neither ``taken``, to which it is added, nor one of ``others``."""
    while name in taken or name in others:
        name += "_"
    taken.add(name)
    return name


def copy_for_chunk(name: str, chunk: int) -> str:
    """What a copy is called of an operation that several chunks of a pipeline repeat."""
    return f"{name}_at{chunk}"


def original(name: str, names: Container[str] = ()) -> str:
    """The name of the node that ``name`` copies (:func:`copy_for_chunk`), if it is not among ``names`` itself."""
    return name if name in names or "_at" not in name else _COPY_FOR_CHUNK.sub("", name)


def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol for a graph symbol such as ``b``: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)
