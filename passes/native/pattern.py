"""Patterns of operations, written as the text of a section, and where they occur in a graph.

>>> from autopar.ir.graph import Graph
>>> pattern = Pattern.from_text('''
... pattern(%x):
...   %e = aten.exp.default(%x)
...   %y = aten.mul.Tensor(%e, "?factor")
...   return %y
... ''')
>>> graph = Graph.from_text('''
... graph()
... %a: f32[2] = input("a")
... %b: f32[2] = aten.exp.default(%a)
... %c: f32[2] = aten.mul.Tensor(%b, 3)
... return output "0" = %c
... ''')
>>> [str(match) for match in matches(pattern, graph)]
['x=%a factor=3 nodes=c,b']

Arguments must be equal, but a string that begins with ``?`` stands for any argument that is not a tensor, the same
wherever it occurs. The operands of a sum or a product may be in either order. Saved activations are looked through: a
value and what is saved of it are the same to a pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Arg, Node, Value, values_in
from autopar.ir.program import Instruction, Section

COMMUTATIVE = frozenset(("aten.add.Tensor", "aten.mul.Tensor"))


@dataclass(frozen=True)
class Pattern:
    """``section``: the operations, from the values that a match takes to those that it gives."""

    section: Section

    @staticmethod
    def from_text(text: str) -> Pattern:
        """Raises :class:`GraphError` naming the line that is no instruction."""
        return Pattern(Section.from_text(text))

    @cached_property
    def makers(self) -> Mapping[str, Instruction]:
        """The instruction of each value that the pattern computes."""
        return {instruction.name: instruction for instruction in self.section.instructions}

    @property
    def last(self) -> Instruction:
        """Where a search begins: most of a pattern is what its last operation needs."""
        return self.section.instructions[-1]

    @cached_property
    def before_last(self) -> frozenset[str]:
        """The operations whose results the last one takes."""
        return frozenset(self.makers[v.node].op for v in values_in(self.last.args) if v.node in self.makers)


@dataclass(frozen=True)
class Match:
    """An occurrence: ``values`` of the graph by the pattern's, ``arguments`` by the names of wildcards, and the nodes
    by the names of instructions."""

    values: Mapping[Value, Value] = field(default_factory=dict)
    arguments: Mapping[str, Arg] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [f"{own.node}={value}" for own, value in self.values.items() if own.node not in self.nodes]
        given += [f"{name}={argument}" for name, argument in self.arguments.items()]
        return " ".join([*given, f"nodes={','.join(node.name for node in self.nodes.values())}"])

    def __getitem__(self, name: str) -> Value:
        """The graph's value for the pattern's ``%name``."""
        return self.values[Value(name)]

    def bound(self, own: Value, value: Value) -> Match | None:
        """The match with ``own`` standing for ``value``; None if it stands for another."""
        if own in self.values:
            return self if self.values[own] == value else None
        return Match({**self.values, own: value}, self.arguments, self.nodes)

    def with_argument(self, name: str, argument: Arg) -> Match | None:
        if name in self.arguments:
            return self if self.arguments[name] == argument else None
        return Match(self.values, {**self.arguments, name: argument}, self.nodes)

    def with_node(self, name: str, node: Node) -> Match:
        return Match(self.values, self.arguments, {**self.nodes, name: node})


@dataclass(frozen=True)
class Occurrences:
    """A graph, in which saved activations are looked through."""

    graph: Graph

    @cached_property
    def origin(self) -> Mapping[str, Value]:
        """What each saved activation saves."""
        origin: dict[str, Value] = {}
        for node in self.graph.nodes:
            if node.op == SAVED_ACTIVATION:
                origin[node.name] = origin.get(node.operands[0].node, node.operands[0])
        return origin

    @cached_property
    def by_op(self) -> Mapping[str, Sequence[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            found.setdefault(node.op, []).append(node)
        return found

    @cached_property
    def op_of(self) -> Mapping[str, str]:
        """The operation that computes each node's result; that of what it saves, if it is a saved activation."""
        ops = {node.name: node.op for node in self.graph.nodes}
        return ops | {name: ops[value.node] for name, value in self.origin.items()}

    @cached_property
    def users(self) -> Mapping[Value, Sequence[Node]]:
        """The nodes that use a value, or what is saved of it."""
        found: dict[Value, dict[str, Node]] = {}
        for node in self.graph.nodes:
            for value in node.operands if node.op != SAVED_ACTIVATION else ():
                found.setdefault(self.base(value), {})[node.name] = node
        return {value: tuple(nodes.values()) for value, nodes in found.items()}

    def base(self, value: Value) -> Value:
        """``value``, or what it was saved from."""
        return self.origin.get(value.node, value)

    def find(self, pattern: Pattern) -> Iterator[Match]:
        """Yields the matches, at most one for each node that can be the pattern's last."""
        if any(instruction.op not in self.by_op for instruction in pattern.section.instructions):
            return  # Last operations are common ones, of which a deep graph has thousands.
        op_of, before_last = self.op_of, pattern.before_last
        for node in self.by_op.get(pattern.last.op, ()):
            if not before_last.issubset([op_of[value.node] for value in node.operands]):
                continue
            whole = (m for part in self._node(pattern, pattern.last, node, Match()) for m in self._rest(pattern, part))
            if (match := next(whole, None)) is not None:
                yield match

    def _rest(self, pattern: Pattern, match: Match) -> Iterator[Match]:
        """Completes a match with the operations that what is matched so far does not need."""
        missing = [i for i in pattern.section.instructions if i.name not in match.nodes]
        if not missing:
            yield match
            return
        for instruction in missing:
            known = [match.values[v] for v in values_in(instruction.args) if v in match.values]
            if known:
                candidates = [node for node in self.users.get(known[0], ()) if node.op == instruction.op]
                for node in candidates:
                    for more in self._node(pattern, instruction, node, match):
                        yield from self._rest(pattern, more)
                return

    def _node(self, pattern: Pattern, instruction: Instruction, node: Node, match: Match) -> Iterator[Match]:
        """Yields the ways in which ``node`` and what it needs are ``instruction`` and what that needs."""
        if instruction.name in match.nodes:
            if match.nodes[instruction.name].name == node.name:
                yield match
            return
        if node.op != instruction.op or _kwargs(node) != _kwargs(instruction):
            return
        for index in range(instruction.results):
            bound = match.bound(Value(instruction.name, index), Value(node.name, index))
            if bound is None:
                return
            match = bound
        orders = [node.args]
        if node.op in COMMUTATIVE and len(node.args) == 2:
            orders.append(node.args[::-1])
        for args in orders:
            yield from self._args(pattern, instruction.args, args, match.with_node(instruction.name, node))

    def _args(self, pattern: Pattern, own: Any, args: Any, match: Match) -> Iterator[Match]:
        """Matches arguments one after the other."""
        if len(own) != len(args):
            return
        if not own:
            yield match
            return
        for more in self._arg(pattern, own[0], args[0], match):
            yield from self._args(pattern, own[1:], args[1:], more)

    def _arg(self, pattern: Pattern, own: Arg, arg: Arg, match: Match) -> Iterator[Match]:
        if isinstance(own, Value):
            if isinstance(arg, Value):
                yield from self._value(pattern, own, self.base(arg), match)
        elif isinstance(own, str) and own.startswith("?"):
            more = None if any(values_in(arg)) else match.with_argument(own[1:], arg)
            if more is not None:
                yield more
        elif isinstance(own, tuple):
            if isinstance(arg, tuple) and not isinstance(arg, Value):
                yield from self._args(pattern, own, arg, match)
        elif type(own) is type(arg) and own == arg:
            yield match

    def _value(self, pattern: Pattern, own: Value, value: Value, match: Match) -> Iterator[Match]:
        bound = match.bound(own, value)
        if bound is None:
            return
        maker = pattern.makers.get(own.node)
        if maker is None:
            yield bound
        elif own.index == value.index:
            yield from self._node(pattern, maker, self.graph[value.node], bound)


def _kwargs(node: Node | Instruction) -> dict[str, Arg]:
    """Keyword arguments but the device: a graph has one, which autograd names in its casts and models do not."""
    return {name: value for name, value in node.kwargs if name != "device"}


def matches(pattern: Pattern, graph: Graph) -> Iterator[Match]:
    """Yields where ``pattern`` occurs in ``graph``."""
    return Occurrences(graph).find(pattern)
