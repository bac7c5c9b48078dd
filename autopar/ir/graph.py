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

With ``to_text(annotated=True)`` the strategies and classes that passes have filled in are part of it
(:mod:`.annotation_text`); hashes and caches use the text without them.

Invariants (:meth:`Graph.verify`): names are unique; every operand is defined before its use; every operand index exists
and is a tensor; forward reads nothing that backward computes; a gradient has the type that its parameter is stored in,
an input's gradient the type of the input, the new value of a buffer or cache its type; a saved activation
(``autopar.saved``) has the type of its operand. Placeholder operations are ``param``, ``buffer``, ``input``,
``tangent``, ``constant`` and ``receive`` (a value of another pipeline stage), ``random`` (the state of
:mod:`autopar.ops.random`) and ``cache`` (an input that stays on the devices between calls, which change it in place, in
the placement that the plan chooses) with one string argument. A ``param`` may also say in which dtype it is ``stored``
(:attr:`Node.stored`) and that its gradient is that of a ``scaled`` loss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import sympy
import torch

from autopar.errors import GraphError

from .annotation_text import annotate_lines, split_annotations
from .graph_text import parse_graph, print_graph, print_nodes, text_lines
from .invariants import check_nodes, check_outputs
from .node import (
    PLACEHOLDERS,
    SAVED_ACTIVATION,
    Arg,
    Node,
    Output,
    TensorType,
    Value,
    has_expression,
    map_arg,
    symbol,
)
from .placements import Strategy

Fact = TypeVar("Fact")
# What is kept of a graph that gets other annotations: it depends on the nodes and outputs alone.
_OF_NODES = (
    "_by_name", "users", "output_values", "_placeholders", "kept", "caches", "new_caches", "parameters", "gradients",
    "_is_verified",
)  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """See the module docstring. ``constants`` maps the names of ``constant`` nodes to tensors.

    Annotations, filled in by passes and part of the text only if asked for: ``strategies`` lists the ways to run each
    node on a mesh, ``classes`` maps each node to a representative of the nodes that must choose the same.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    symbols: tuple[tuple[str, int], ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    strategies: Mapping[str, tuple[Strategy, ...]] = field(default_factory=dict, compare=False)
    classes: Mapping[str, str] = field(default_factory=dict, compare=False)

    def annotated(
        self, *, strategies: Mapping[str, tuple[Strategy, ...]] | None = None, classes: Mapping[str, str] | None = None
    ) -> Graph:
        """The graph with other annotations. What is known of its nodes need not be found out again."""
        keeps_classes = classes is None or classes is self.classes
        other = replace(
            self,
            strategies=self.strategies if strategies is None else strategies,
            classes=self.classes if classes is None else classes,
        )
        known = vars(self)
        kept = (*_OF_NODES, "_facts") if keeps_classes else _OF_NODES
        vars(other).update((name, known[name]) for name in kept if name in known)
        return other

    def once(self, name: Hashable, make: Callable[[], Fact]) -> Fact:
        """What ``make`` finds out about this graph, found out once. It depends on the nodes, outputs and classes alone,
        and not on strategies. Other modules use it for what is asked for often."""
        if name not in self._facts:
            self._facts[name] = make()
        fact: Fact = self._facts[name]
        return fact

    @cached_property
    def _facts(self) -> dict[Hashable, Any]:
        return {}

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
        users: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for index, value in enumerate(node.operands):
                users.setdefault(value, []).append((node, index))
        return {value: tuple(uses) for value, uses in users.items()}

    @cached_property
    def output_values(self) -> frozenset[Value]:
        return frozenset(output.value for output in self.outputs if output.value is not None)

    def placeholders(self, kind: str) -> tuple[Node, ...]:
        return self._placeholders.get(kind, ())

    @cached_property
    def _placeholders(self) -> dict[str, tuple[Node, ...]]:
        """By kind; asked for often, of large graphs."""
        kinds: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.is_placeholder:
                kinds.setdefault(node.op, []).append(node)
        return {kind: tuple(nodes) for kind, nodes in kinds.items()}

    @cached_property
    def kept(self) -> frozenset[str]:
        """The saved activations whose values are held until backward; the others only pass on what forward needs, or
        what backward recomputes."""
        read = {v.node for node in self.nodes if node.phase == "backward" for v in node.operands}
        read |= {o.value.node for o in self.outputs if o.value is not None and o.kind.endswith("gradient")}
        return frozenset(
            n.name for n in self.nodes if n.op == SAVED_ACTIVATION and n.phase == "forward" and n.name in read
        )

    @cached_property
    def caches(self) -> Mapping[str, Node]:
        """The placeholders of the caches by their names."""
        return {node.target: node for node in self.placeholders("cache")}

    @cached_property
    def new_caches(self) -> Mapping[Value, tuple[str, ...]]:
        """The values that caches get, each with the names of their placeholders' nodes."""
        found: dict[Value, tuple[str, ...]] = {}
        for output in self.outputs:
            if output.kind == "mutation" and output.value is not None and output.name in self.caches:
                found[output.value] = (*found.get(output.value, ()), self.caches[output.name].name)
        return found

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The placeholders of what a call passes: inputs and caches, in order."""
        return tuple(node for node in self.nodes if node.op in ("input", "cache"))

    @cached_property
    def parameters(self) -> Mapping[str, Node]:
        """The placeholders of the parameters by their paths."""
        return {node.target: node for node in self.placeholders("param")}

    @cached_property
    def gradients(self) -> Mapping[str, Value]:
        """The gradient of each parameter that gets one, by the parameter's path."""
        pairs = ((output.name, output.value) for output in self.outputs if output.kind == "gradient")
        return {path: value for path, value in pairs if value is not None}

    def type_of(self, value: Value) -> TensorType:
        tensor_type = self._by_name[value.node].types[value.index]
        if tensor_type is None:
            raise GraphError(f"{value} is not a tensor")
        return tensor_type

    def at(self, **symbols: int) -> Graph:
        """The graph with every symbol replaced by an integer (by its traced hint if not given)."""
        sizes = {**dict(self.symbols), **symbols}
        if not self.symbols:
            return self
        return self.fixed(sizes)

    def fixed(self, sizes: Mapping[str, int]) -> Graph:
        """The graph with these symbols replaced by integers; others stay. Asked again, it is the same object. Raises
        :class:`GraphError` for sizes of which a shape is negative or broken, or a number is infinite."""
        key = tuple(sorted(sizes.items()))
        if key not in self._fixed:
            self._fixed[key] = self._with_sizes(sizes)
        return self._fixed[key]

    @cached_property
    def _fixed(self) -> dict[tuple[tuple[str, int], ...], Graph]:
        return {}

    def _with_sizes(self, sizes: Mapping[str, int]) -> Graph:
        symbols = tuple((name, hint) for name, hint in self.symbols if name not in sizes)
        return replace(self, nodes=tuple(map(_Sizes(sizes).node, self.nodes)), symbols=symbols)

    def verify(self) -> Graph:
        """Returns itself, or raises :class:`GraphError` naming the first broken invariant."""
        _ = self._is_verified
        return self

    @cached_property
    def _is_verified(self) -> bool:
        """Cached: a graph is immutable, so one check serves every pass that it goes through."""
        check_outputs(self.outputs, check_nodes(self.nodes))
        return True

    def needed_for(self, values: Iterable[Value]) -> set[str]:
        """Names of the nodes that ``values`` depend on, their own included."""
        needed = {value.node for value in values}
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update([value.node for value in node.operands])
        return needed

    def without_dead(self) -> Graph:
        """The graph without nodes that no output needs, or itself if there are none; placeholders stay."""
        needed = self.needed_for(self.output_values)
        nodes = tuple([n for n in self.nodes if n.name in needed or n.is_placeholder])
        return self if len(nodes) == len(self.nodes) else replace(self, nodes=nodes)

    def to_text(self, annotated: bool = False) -> str:
        """The text form, which :meth:`from_text` reads; constants print by name only, annotations if asked for."""
        annotations = (self.strategies, self.classes) if annotated else ({}, {})
        return print_graph(self.symbols, annotate_lines(print_nodes(self.nodes), *annotations), self.outputs)

    @staticmethod
    def from_text(text: str) -> Graph:
        """The graph that :meth:`to_text` printed. Raises :class:`GraphError` naming the line."""
        lines, strategies, classes = split_annotations(text_lines(text))
        symbols, nodes, outputs = parse_graph(lines)
        return Graph(nodes, outputs, symbols, {}, strategies, classes).verify()

    def __str__(self) -> str:
        counts = {kind: len(self.placeholders(kind)) for kind in PLACEHOLDERS}
        placed = ", ".join(f"{count} {kind}s" for kind, count in counts.items() if count)
        return f"Graph with {len(self.nodes) - sum(counts.values())} operations ({placed})"


class _Sizes:
    """Puts ``sizes`` in place of symbols. Nodes of equal layers share types, of which equal ones stay the same objects,
    and forms."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self._names = sizes, {symbol(name): size for name, size in sizes.items()}
        self._numbers: dict[sympy.Expr, Arg] = {}
        self._types: dict[TensorType | None, TensorType | None] = {None: None}
        # By identity; the nodes of the graph keep them.
        self._types_at: dict[int, tuple[TensorType | None, ...]] = {}
        # By form, whether arguments have expressions of sizes.
        self._are_symbolic: dict[str, bool] = {}

    def node(self, node: Node) -> Node:
        if not node.is_symbolic:
            return node
        types, form = self._concrete(node.types), node.form
        if form not in self._are_symbolic:
            self._are_symbolic[form] = has_expression((node.args, tuple(arg for _, arg in node.kwargs)))
        if not self._are_symbolic[form]:
            return node.of_types(types)
        kwargs = tuple((key, map_arg(arg, self._leaf)) for key, arg in node.kwargs)
        args = map_arg(node.args, self._leaf)
        return Node(node.name, node.op, args, kwargs, types, node.module, node.source, node.phase)

    def _concrete(self, types: tuple[TensorType | None, ...]) -> tuple[TensorType | None, ...]:
        if (key := id(types)) not in self._types_at:
            self._types_at[key] = tuple(map(self._type, types))
        return self._types_at[key]

    def _type(self, kind: TensorType | None) -> TensorType | None:
        if kind is not None and kind not in self._types:
            self._types[kind] = TensorType(tuple(map(self._size, kind.shape)), kind.dtype)
        return self._types[kind]

    def _size(self, arg: Arg) -> Any:
        number = self._leaf(arg)
        if isinstance(number, float) or (isinstance(number, int) and number < 0):
            raise _does_not_hold(self.sizes, f"a size, {arg}, is {number}")
        return number

    def _leaf(self, arg: Arg) -> Arg:
        if not isinstance(arg, sympy.Expr):
            return arg
        if arg not in self._numbers:
            self._numbers[arg] = _number(arg, self._names)
        return self._numbers[arg]


def _number(expression: sympy.Expr, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """``expression`` with ``sizes`` for symbols, as a number unless it has others. Raises :class:`GraphError` if it is
    none, as where a size is divided by zero."""
    number = sympy.sympify(expression).subs(sizes)
    if number.free_symbols:
        return number
    if not number.is_finite or not number.is_real:
        raise _does_not_hold(sizes, f"{expression} is {number}")
    return int(number) if number.is_integer else float(number)


def _does_not_hold(sizes: Mapping[Any, int], why: str) -> GraphError:
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return GraphError(f"the graph does not hold for {at}: {why}")
