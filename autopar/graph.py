"""The graph every pass reads and writes: a flat list of ATen operations with types.

A :class:`Graph` is immutable and holds no torch objects but dtypes, devices and lifted constants, so that
passes are pure functions and tests compare text. Shapes are integers or sympy expressions of the
symbols in ``Graph.symbols`` (the batch size); ``graph.at(b=8)`` gives the concrete graph.

Text form (round-trips through :meth:`Graph.to_text` / :meth:`Graph.from_text`)::

    graph(b=8)
    %weight: f32[16, 4] = param("embed.weight")
    %ids: i64[b] = input("ids")
    %out: f32[b, 4] = aten.embedding.default(%weight, %ids)  @embed
    return gradient "embed.weight" = %out

Invariants (:meth:`Graph.verify`): names are unique; every operand is defined before its use; every
operand index exists; placeholder operations are ``param``, ``buffer``, ``input``, ``tangent``, ``constant`` and
``receive`` (a value of another pipeline stage) and ``random`` (the state of :mod:`autopar.random_ops`) with one string
argument. A ``param`` may also say in which dtype it is ``stored`` (:attr:`Node.stored`) and
that its gradient is of a ``scaled`` loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import sympy
import torch

from .errors import GraphError
from .spec import Strategy

Dim: TypeAlias = int | sympy.Expr
Phase = Literal["forward", "backward"]
OutputKind = Literal["output", "gradient", "input_gradient", "mutation", "send"]

PLACEHOLDERS = ("param", "buffer", "input", "tangent", "constant", "receive", "random")
# The keyword of a parameter that is stored in another dtype than the graph reads (:attr:`Node.stored`).
STORED = "stored"
# The keyword of one whose gradient is that of a scaled loss.
SCALED = "scaled"
# The identity that keeps a value for backward (:mod:`autopar.passes.rest`).
REST = "autopar.rest"
# What the copy of a forward node is called that backward computes again (:mod:`autopar.passes.recompute`).
RECOMPUTED = "_recomputed"
# The views of a normalised graph: they cost nothing to repeat and hold no memory of their own.
VIEWS = frozenset(("aten.reshape.default", "aten.permute.default", "aten.expand.default"))

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


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (``int`` or sympy) and dtype of one tensor, both global."""

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
        return f"{DTYPE_NAMES[self.dtype]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Value:
    """Result ``index`` of the node called ``node``; prints as ``%node`` or ``%node.index``."""

    node: str
    index: int = 0

    def __str__(self) -> str:
        return f"%{self.node}" if self.index == 0 else f"%{self.node}.{self.index}"


# An argument is None, bool, int, float, str, sympy.Expr, Value, a torch dtype/device/layout/memory format,
# or a (nested) tuple of these.
Arg = Any


def map_arg(arg: Arg, function: Callable[[Arg], Arg]) -> Arg:
    """``arg`` with ``function`` applied to every leaf; tuples keep their structure."""
    if isinstance(arg, (tuple, list)):
        return tuple(map_arg(item, function) for item in arg)
    return function(arg)


def values_in(arg: Arg) -> Iterator[Value]:
    """The :class:`Value` leaves of ``arg``, left to right."""
    if isinstance(arg, Value):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from values_in(item)


@dataclass(frozen=True)
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

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """Tensor operands in order of appearance, repeats included: ``mul(%x, %x)`` has two."""
        return (*values_in(self.args), *values_in(tuple(arg for _, arg in self.kwargs)))

    @property
    def type(self) -> TensorType:
        """The type of the only (or first) result."""
        if not self.types or self.types[0] is None:
            raise GraphError(f"%{self.name} = {self.op} has no tensor result")
        return self.types[0]

    @property
    def stored(self) -> TensorType:
        """The type a parameter is stored in, updated in and has its gradient in: its own, unless the graph reads a copy
        of fewer bits, made once a step: ``%w: bf16[4] = param("w", stored=torch.float32)``."""
        dtype: torch.dtype | None = dict(self.kwargs).get(STORED)
        return self.type if dtype is None else replace(self.type, dtype=dtype)

    @property
    def is_scaled(self) -> bool:
        """Whether the gradient of a parameter is computed of a scaled loss: ``param("w", scaled=True)``."""
        return bool(dict(self.kwargs).get(SCALED, False))

    @property
    def is_placeholder(self) -> bool:
        return self.op in PLACEHOLDERS

    @property
    def target(self) -> str:
        """The fully qualified name behind a placeholder (parameter path, input name, ...)."""
        return str(self.args[0])

    def map_values(self, function: Callable[[Value], Value]) -> Node:
        def leaf(arg: Arg) -> Arg:
            return function(arg) if isinstance(arg, Value) else arg

        kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in self.kwargs)
        return replace(self, args=map_arg(self.args, leaf), kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class Output:
    """One result of the graph: a model ``output`` (``name`` is its index), the ``gradient`` of the parameter ``name``,
    the ``input_gradient`` of an input, the new value (``mutation``) of the buffer ``name``, or the value ``name`` to
    ``send`` to other pipeline stages. ``value`` is None for a
    result that is None (a parameter without gradient)."""

    kind: OutputKind
    name: str
    value: Value | None


@dataclass(frozen=True)
class Graph:
    """See the module docstring. ``constants`` maps the names of ``constant`` nodes to tensors.

    Annotations, filled in by passes and not part of the text: ``strategies`` lists the ways to run each node on a mesh,
    ``classes`` maps each node to a representative of the nodes that must choose the same.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    symbols: tuple[tuple[str, int], ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    strategies: Mapping[str, tuple[Strategy, ...]] = field(default_factory=dict, compare=False)
    classes: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def users(self) -> Mapping[Value, tuple[tuple[Node, int], ...]]:
        """For each value its uses ``(node, operand index)``; values nobody uses are absent."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for index, value in enumerate(node.operands):
                found.setdefault(value, []).append((node, index))
        return {value: tuple(uses) for value, uses in found.items()}

    @cached_property
    def output_values(self) -> frozenset[Value]:
        return frozenset(output.value for output in self.outputs if output.value is not None)

    def placeholders(self, kind: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.op == kind)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The rests whose values are held until backward; others only pass on what forward needs, or what backward
        has computed again."""
        read = {v.node for node in self.nodes if node.phase == "backward" for v in node.operands}
        read |= {o.value.node for o in self.outputs if o.value is not None and o.kind.endswith("gradient")}
        return frozenset(n.name for n in self.nodes if n.op == REST and n.phase == "forward" and n.name in read)

    @cached_property
    def parameters(self) -> Mapping[str, Node]:
        """The placeholders of the parameters by their paths."""
        return {node.target: node for node in self.placeholders("param")}

    @cached_property
    def gradients(self) -> Mapping[str, Value]:
        """By the path of each parameter that gets a gradient, the value that is it."""
        made = ((output.name, output.value) for output in self.outputs if output.kind == "gradient")
        return {path: value for path, value in made if value is not None}

    def type_of(self, value: Value) -> TensorType:
        found = self[value.node].types[value.index]
        if found is None:
            raise GraphError(f"{value} is not a tensor")
        return found

    def at(self, **symbols: int) -> Graph:
        """The graph with every symbol replaced by an integer (by its traced hint if not given)."""
        sizes = {**dict(self.symbols), **symbols}
        if not self.symbols:
            return self
        names = {sympy.Symbol(k, positive=True, integer=True): v for k, v in sizes.items()}
        cache: dict[sympy.Expr, int | float] = {}

        def leaf(arg: Arg) -> Arg:
            if not isinstance(arg, sympy.Expr):
                return arg
            if arg not in cache:
                number = sympy.sympify(arg).subs(names)
                cache[arg] = int(number) if number.is_integer else float(number)
            return cache[arg]

        def concrete(node: Node) -> Node:
            types = tuple(t and TensorType(tuple(map(leaf, t.shape)), t.dtype) for t in node.types)
            kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in node.kwargs)
            return replace(node, args=map_arg(node.args, leaf), kwargs=kwargs, types=types)

        return replace(self, nodes=tuple(map(concrete, self.nodes)), symbols=())

    def verify(self) -> Graph:
        """Returns itself, or raises :class:`GraphError` naming the first broken invariant."""
        defined: dict[str, Node] = {}
        for node in self.nodes:
            for value in node.operands:
                if value.node not in defined:
                    raise GraphError(f"%{node.name} = {node.op} uses {value} before its definition")
                if value.index >= len(defined[value.node].types):
                    raise GraphError(f"%{node.name} uses {value}, but {defined[value.node].op} has no such result")
            if node.name in defined:
                raise GraphError(f"%{node.name} is defined twice")
            defined[node.name] = node
        for output in self.outputs:
            if output.value is not None and output.value.node not in defined:
                raise GraphError(f"the {output.kind} {output.name!r} is {output.value}, which is not defined")
        return self

    def needed_for(self, values: Iterable[Value]) -> set[str]:
        """Names of the nodes that ``values`` depend on, their own included."""
        needed = {value.node for value in values}
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(value.node for value in node.operands)
        return needed

    def without_dead(self) -> Graph:
        """The graph without nodes that no output needs; placeholders stay."""
        needed = self.needed_for(self.output_values)
        return replace(self, nodes=tuple(n for n in self.nodes if n.name in needed or n.is_placeholder))

    def to_text(self) -> str:
        from .text import print_graph

        return print_graph(self)

    @staticmethod
    def from_text(text: str) -> Graph:
        from .text import parse_graph

        return parse_graph(text)

    def __str__(self) -> str:
        counts = {kind: len(self.placeholders(kind)) for kind in PLACEHOLDERS}
        placed = ", ".join(f"{count} {kind}s" for kind, count in counts.items() if count)
        return f"Graph with {len(self.nodes) - sum(counts.values())} operations ({placed})"


def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol for a graph symbol such as ``b``: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)
