"""Leaves out layers of deep stacks, so that what repeats with depth can be measured on few layers.

A stack is a numbered container (``h.``, ``encoder.layers.``) whose layers are equal, or equal in turns (a mixture in
every second one), by the classes of :mod:`.fold`. The layers left out lie in the middle. Whatever reads a value of one
of them reads that of the layer which is now as far away as that one was::

    %h2 = aten.tanh.default(%h1)  @h.2
    %h3 = aten.tanh.default(%h2)  @h.3
    %h4 = aten.tanh.default(%h3)  @h.4

is, without layer 3 ::

    %h2 = aten.tanh.default(%h1)  @h.2
    %h4 = aten.tanh.default(%h2)  @h.4
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.passes.base import Pass

# The longest turn in which layers may repeat. Chosen: Llama 4 and Gemma 3 repeat after four and six.
LONGEST_PERIOD = 8


@dataclass(frozen=True)
class Stack:
    """The layers ``path`` + number, numbered from 0, of which there are ``depth``. Those from ``first`` to before
    ``last`` repeat every ``period``."""

    path: str
    depth: int
    period: int
    first: int
    last: int


@dataclass(frozen=True)
class OmitLayers(Pass):
    """Leaves out ``count`` layers of ``stack`` from ``begin``: a multiple of its period, with at least one period of
    layers that repeat on either side. Raises :class:`GraphError` if a value of theirs is read outside of the stack, or
    by a layer for which none is as far away any more, or if nothing is left that reads some result from outside."""

    name: ClassVar[str] = "omit-layers"
    stack: Stack
    begin: int
    count: int

    def apply(self, graph: Graph) -> Graph:
        layers = _Layers.of(graph, self.stack.path)
        gone = {name for name, number in layers.number.items() if self._omits(number)}
        nodes = [self._moved(node, layers, gone) for node in graph.nodes if node.name not in gone]
        self._check_readers(graph, layers, nodes, gone)
        names = {node.name for node in nodes}
        outputs = tuple(each for each in graph.outputs if each.value is None or each.value.node in names)
        classes = {name: first for name, first in graph.classes.items() if name in names}
        return replace(graph, nodes=tuple(nodes), outputs=outputs, classes=_by_kept(classes))

    def repeated(self, graph: Graph) -> range | None:
        """The turn of layers, before or after those left out, that these repeat: what they take from outside, and what
        takes their values, is that of the layer which is left, so what any of them costs is what that one costs. None
        if there is none. ``graph``: the one with all layers."""
        begin, end, period = self.begin, self.begin + self.count, self.stack.period
        ties = self._ties(graph, range(begin - period, end + period))
        for turn, distance in ((range(begin - period, begin), -period), (range(end, end + period), period)):
            pairs = ((ties[number], ties[number + distance]) for number in range(begin, end)) if ties else ()
            if ties and all(own == other or Counter(own) == Counter(other) for own, other in pairs):
                return turn
        return None

    def _ties(self, graph: Graph, numbers: range) -> dict[int, list[Hashable]]:
        """For some layers, which values of others they take, and where theirs are taken; empty if a gradient is made
        in another layer than its parameter is in."""
        layers = _Layers.of(graph, self.stack.path)
        ties: dict[int, list[Hashable]] = {number: [] for number in numbers}
        for node in graph.nodes:
            own, place = layers.number.get(node.name), layers.place.get(node.name)
            for position, value in enumerate(node.operands):
                number = layers.number.get(value.node)
                if number is None:
                    if own in ties:
                        ties[own].append((place, position, value))
                elif number in ties:
                    distance = None if own is None else own - number
                    ties[number].append((layers.place[value.node], value.index, place, position, distance))
        owners = {node.target: node.name for node in graph.nodes if node.is_placeholder}
        for output in graph.outputs:
            if output.value is not None:
                owner = "" if output.kind == "output" else owners.get(output.name, "")
                number = layers.number.get(output.value.node)
                if layers.number.get(owner, number) != number:
                    return {}
                if number in ties:
                    made = layers.place[output.value.node], output.value.index
                    ties[number].append((*made, output.kind, layers.place.get(owner)))
        return ties

    def _check_readers(self, graph: Graph, layers: _Layers, left: list[Node], gone: Set[str]) -> None:
        """Raises :class:`GraphError` if layers that are left out were all that read some result from outside."""
        read = {value for node in left for value in node.operands} | graph.output_values
        for node in graph.nodes:
            if node.name in gone:
                for value in node.operands:
                    is_outside = value.node not in layers.number and not graph[value.node].is_placeholder
                    if is_outside and value not in read:
                        raise GraphError(f"only layers of {self.stack.path}* that are left out read {value}")

    def _omits(self, number: int | None) -> bool:
        return number is not None and self.begin <= number < self.begin + self.count

    def _moved(self, node: Node, layers: _Layers, gone: Set[str]) -> Node:
        if gone.isdisjoint([value.node for value in node.operands]):
            return node
        return node.map_values(partial(self._source, node, layers))

    def _source(self, node: Node, layers: _Layers, value: Value) -> Value:
        """What ``node`` reads instead of ``value``."""
        read, own = layers.number.get(value.node), layers.number.get(node.name)
        if read is None or not self._omits(read):
            return value
        if own is None:
            raise GraphError(f"%{node.name}, outside of {self.stack.path}*, reads {value} of layer {read}")
        # The layer as far from this one as the one that is left out was, among those that are left.
        number = (own if own < self.begin else own - self.count) + read - own
        number += self.count if number >= self.begin else 0
        found = layers.nodes.get((number, *layers.place[value.node]))
        if found is None:
            raise GraphError(f"%{node.name} reads {value}, and layer {number} of {self.stack.path}* has no such node")
        return Value(found, value.index)


def _by_kept(classes: Mapping[str, str]) -> dict[str, str]:
    """The classes, each named by the first node that is left of it."""
    first: dict[str, str] = {}
    return {name: first.setdefault(representative, name) for name, representative in classes.items()}


@dataclass(frozen=True)
class _Layers:
    """Of the nodes of a stack: the number of the layer, the ``place`` (class, and which of that class in the layer),
    and the names by both."""

    number: Mapping[str, int]
    place: Mapping[str, tuple[str, int]]
    nodes: Mapping[tuple[int, str, int], str]

    @staticmethod
    def of(graph: Graph, path: str) -> _Layers:
        number, place = dict[str, int](), dict[str, tuple[str, int]]()
        seen, nodes = dict[tuple[int, str], int](), dict[tuple[int, str, int], str]()
        layers = {own: number_at(own, path) for own in {node.path for node in graph.nodes}}
        for node in graph.nodes:
            layer = layers[node.path]
            if layer is None:
                continue
            own = graph.classes.get(node.name, node.name)
            before = seen.get((layer, own), 0)
            number[node.name], place[node.name] = layer, (own, before)
            nodes[layer, own, before] = node.name
            seen[layer, own] = before + 1
        return _Layers(number, place, nodes)


def number_in(node: Node, path: str) -> int | None:
    """The number of the layer of the stack at ``path`` that a node is in; None if it is in none."""
    return number_at(node.path, path)


def number_at(own: str, path: str) -> int | None:
    """:func:`number_in` of a node whose path is ``own``."""
    number = own[len(path) :].partition(".")[0] if own.startswith(path) else ""
    return int(number) if number.isdigit() else None


def stacks_of(graph: Graph, least: int) -> tuple[Stack, ...]:
    """The outermost stacks of a graph with classes, of at least ``least`` layers that repeat."""
    sequences: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    containers = {path: tuple(_numbers(path)) for path in {node.path for node in graph.nodes}}
    for node in graph.nodes:
        for path, number in containers[node.path]:
            sequences[path][number].append(graph.classes.get(node.name, node.name))
    found: list[Stack] = []
    for path, layers in sorted(sequences.items(), key=lambda item: len(item[0])):
        inside = any(path.startswith(outer.path) for outer in found)
        if inside or len(layers) < least or sorted(layers) != list(range(len(layers))):
            continue
        stack = _repeating(path, [tuple(layers[number]) for number in range(len(layers))])
        if stack is not None and stack.last - stack.first >= least:
            found.append(stack)
    return tuple(found)


def _numbers(path: str) -> Iterator[tuple[str, int]]:
    """The numbered containers of a path, and the numbers in them: ``a.1.b.2`` is in ``a.`` and ``a.1.b.``."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            yield "".join(f"{each}." for each in parts[:i]), int(part)


def _repeating(path: str, layers: list[tuple[str, ...]]) -> Stack | None:
    """The stack of ``layers``, by the classes of their nodes, with the longest stretch that repeats; None if none
    does."""
    best: Stack | None = None
    for period in range(1, min(LONGEST_PERIOD, len(layers) // 2) + 1):
        first = 0
        for at in range(len(layers)):
            ends = at + period >= len(layers) or layers[at] != layers[at + period]
            if ends:
                last = min(at + period, len(layers))
                if last - first > period and (best is None or last - first > best.last - best.first):
                    best = Stack(path, len(layers), period, first, last)
                first = at + 1
    return best
