"""Assigns every operation of a cut graph to a chunk.

The cuts determine the chunks of forward operations. Two kinds belong to no chunk and are *repeated* in every chunk that
uses them, because sending their operands costs less, or nothing: operations that depend on data alone (positions,
masks), and views. Backward operations that read no gradient are repeated too.

The chunks of other backward operations follow from their operands. Gradients are only sent to earlier chunks, so an
operation cannot be in a later chunk than the gradients it reads. It must be in a chunk where the forward values it
reads exist, computed or received there anyway. This decides most cases, since the operands of a forward operation exist
in its chunk. Of several possible chunks the one that sends fewer bytes is taken; an operation that only a weight's
gradient needs is in the chunk of the weight. Where backward has a copy of an operation of forward
(:mod:`autopar.passes.recompute.compute_again`), a chunk whose forward receives the result reads that, and has no copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ops.random import DRAWS

from .data_only import data_only_nodes
from .repeated import copies_in_backward, repeated_nodes

Chunks = frozenset[int]
_ADD = "aten.add.Tensor"


def forward_chunks(graph: Graph, cuts: tuple[str, ...]) -> dict[str, int]:
    """The chunk of each forward operation; ``cuts``: the names of the operations that begin chunks.

    Raises :class:`OptionsError` if they are not forward operations in the order of the graph.
    """
    order = [node.name for node in graph if node.phase == "forward" and not node.is_placeholder]
    places = {name: index for index, name in enumerate(order)}
    unknown = [name for name in cuts if name not in places]
    if unknown:
        raise OptionsError(f"cannot cut at %{unknown[0]}: the graph has no forward operation of that name")
    starts = [places[name] for name in cuts]
    if starts != sorted(set(starts)) or (starts and starts[0] == 0):
        raise OptionsError(
            f"cuts must follow the order of the graph, and leave something before each: {', '.join(cuts)}"
        )
    begins, chunks, chunk = set(cuts), {}, 0
    for name in order:
        chunk += name in begins
        chunks[name] = chunk
    return chunks


def gradient_parts(graph: Graph) -> dict[str, tuple[Value, ...]]:
    """For each parameter the values whose sum is its gradient: sums that nothing else uses are split."""
    return graph.once(gradient_parts, lambda: _gradient_parts(graph))


def _gradient_parts(graph: Graph) -> dict[str, tuple[Value, ...]]:

    def parts(value: Value, top: bool) -> tuple[Value, ...]:
        node = graph[value.node]
        alone = len(graph.users.get(value, ())) == (0 if top else 1) and results[value] == (1 if top else 0)
        plain = node.op == _ADD and not node.kwargs and len(node.operands) == 2
        if not (alone and plain and all(graph.type_of(operand) == node.type for operand in node.operands)):
            return (value,)
        return tuple(part for operand in node.operands for part in parts(operand, False))

    results = Counter(output.value for output in graph.outputs)
    gradients = [o for o in graph.outputs if o.kind == "gradient"]
    return {o.name: () if o.value is None else parts(o.value, True) for o in gradients}


@dataclass
class ChunkLayout:
    """Which chunk each operation belongs to. ``home``: the chunk of every operation that has one; ``owners``: the
    chunks where forward uses a parameter (by node name); ``parts``: the values that each gradient is the sum of;
    ``unused``: see :func:`.cut.cut`."""

    graph: Graph
    cuts: tuple[str, ...]
    home: dict[str, int] = field(default_factory=dict)
    owners: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    parts: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    unused: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._received: defaultdict[Value, set[int]] = defaultdict(set)
        self._drawn: defaultdict[str, set[int]] = defaultdict(set)
        self._seen: set[tuple[str, int]] = set()
        self._tops: dict[str, int] = {}
        self._options: dict[str, list[int]] = {}
        self._gradients: dict[str, list[Value]] = {}
        self._data = data_only_nodes(self.graph)
        self.home = forward_chunks(self.graph, self.cuts)
        self.repeated, self.copies = repeated_nodes(self.graph), copies_in_backward(self.graph)
        self._follow_uses()
        for path, chunk in self.unused.items():
            if path in self.parameters and not self.owners[self.parameters[path].name]:
                self.owners[self.parameters[path].name].add(chunk)
        self._tangents()
        self.parts = gradient_parts(self.graph)
        self._assign_backward()

    @property
    def count(self) -> int:
        return len(self.cuts) + 1

    @cached_property
    def parameters(self) -> Mapping[str, Node]:
        """Parameters by path."""
        return {node.target: node for node in self.graph.placeholders("param")}

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The position of each node in the graph."""
        return {node.name: index for index, node in enumerate(self.graph)}

    @cached_property
    def members(self) -> Mapping[int, tuple[Node, ...]]:
        """The operations of each chunk, in the order of the graph."""
        members: defaultdict[int, list[Node]] = defaultdict(list)
        for node in self.graph:
            if not node.is_placeholder and node.name in self.home:
                members[self.home[node.name]].append(node)
        return {chunk: tuple(nodes) for chunk, nodes in members.items()}

    @cached_property
    def gradient_chunks(self) -> Mapping[str, frozenset[int]]:
        """The chunks that return a part of a parameter's gradient, or that it has none, by the parameter's path."""
        chunks: dict[str, frozenset[int]] = {}
        for path, parts in self.parts.items():
            first = min(self.owners[self.parameters[path].name], default=0)
            chunks[path] = frozenset({self.home.get(part.node, first) for part in parts} or {first})
        return chunks

    def received_for(self, value: Value, chunk: int) -> Value | None:
        """What ``chunk`` receives for its forward and reads instead of ``value``, which is a copy of it; None if there
        is no such value."""
        original = Value(self.copies[value.node], value.index) if value.node in self.copies else None
        if original is None or self.home[original.node] == chunk or chunk not in self._received.get(original, ()):
            return None
        return original

    def _follow_uses(self) -> None:
        """Records which values forward sends to which chunks, and where it uses each parameter."""
        for node in self.graph:
            if node.name in self.home and node.name not in self.repeated:
                self._use(node.operands, self.home[node.name])
        for output in self.graph.outputs:
            if output.kind in ("output", "mutation") and output.value is not None:
                self._use((output.value,), self.home.get(output.value.node, 0))

    def _use(self, values: Iterable[Value], chunk: int) -> None:
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            node = self.graph[value.node]
            if node.op == "param":
                self.owners[node.name].add(chunk)
            elif self.received_for(value, chunk) is not None:
                continue
            elif node.name in self.repeated and (node.name, chunk) not in self._seen:
                self._seen.add((node.name, chunk))
                if node.op in DRAWS:
                    self._drawn[node.name].add(chunk)
                waiting += node.operands
            elif node.name in self.home and node.name not in self.repeated:
                self._received[value].add(chunk)

    def _tangents(self) -> None:
        values = {output.name: output.value for output in self.graph.outputs if output.kind == "output"}
        for node in self.graph.placeholders("tangent"):
            value = values.get(node.target)
            self._tops[node.name] = self.home.get(value.node, 0) if value else self.count - 1

    # Backward

    def at_hand(self, value: Value) -> Chunks | None:
        """The chunks where a forward value exists or can be repeated; None: all chunks. A random draw, though it can be
        repeated, counts only where it has been drawn."""
        repeated: dict[str, Chunks | None] = {}

        def of(value: Value) -> Chunks | None:
            node = self.graph[value.node]
            if node.op == "param":
                return frozenset(self.owners[node.name])
            if node.is_placeholder:
                return None
            if node.name in self._drawn:
                return frozenset(self._drawn[node.name])
            if node.name not in self.repeated:
                return frozenset(self._received[value] | {self.home[node.name]})
            if node.name not in repeated:
                common = _common(of(operand) for operand in node.operands)
                original = self.copies.get(node.name)
                if common is not None and original is not None:
                    common |= self._received.get(Value(original, value.index), set())
                repeated[node.name] = common
            return repeated[node.name]

        return of(value)

    def driven(self, node: Node) -> list[Value]:
        """The operands that are gradients, once all operations before it have been bound."""
        if node.name not in self._gradients:
            self._gradients[node.name] = [value for value in node.operands if value.node in self._tops]
        return self._gradients[node.name]

    def _assign_backward(self) -> None:
        dissolved = self._dissolved()
        nodes = [
            node
            for node in self.graph
            if node.phase == "backward"
            and not node.is_placeholder
            and node.name not in self.repeated
            and node.name not in dissolved
        ]
        for node in nodes:
            self._bound(node)
        self._settle(nodes)

    def _dissolved(self) -> set[str]:
        """The additions that :func:`gradient_parts` split."""
        names: set[str] = set()
        for path, gradient in self.graph.gradients.items():
            waiting, parts = [gradient], set(self.parts[path])
            while waiting:
                value = waiting.pop()
                if value not in parts:
                    names.add(value.node)
                    waiting += self.graph[value.node].operands
        return names

    def _bound(self, node: Node) -> None:
        """Determines the chunks that a backward operation can be in, and the last of them."""
        top = min((self._tops[value.node] for value in self.driven(node)), default=self.count - 1)
        saved = [value for value in node.operands if value.node not in self._tops]
        common = _common(self.at_hand(value) for value in saved)
        options = list(range(top + 1)) if common is None else sorted(chunk for chunk in common if chunk <= top)
        if not options:
            options = [min(range(top, -1, -1), key=lambda chunk: self._missing(saved, chunk))]
            self._use(saved, options[0])
        self._options[node.name], self._tops[node.name] = options, options[-1]

    def _missing(self, values: Iterable[Value], chunk: int) -> float:
        """Bytes to send so that ``values`` exist in a chunk; those of later chunks would have to be recomputed, which
        counts a million times as much. Values that depend on data alone are never sent."""
        total = 0.0
        for value in values:
            places = self.at_hand(value)
            if places is not None and chunk not in places and value.node not in self._data:
                above = self.graph[value.node].op != "param" and min(places, default=0) > chunk
                # A weight above any ratio of sizes: chosen.
                total += int(self.graph.type_of(value).bytes) * (1e6 if above else 1.0)
        return total

    def _settle(self, nodes: list[Node]) -> None:
        """Chooses chunks from the last operation to the first: each as early as its users allow, unless that sends more
        bytes. Users that have no chunk yet are expected to do the same."""
        wanted, expected = self._wanted_results(), _Expected(self, nodes)
        for node in reversed(nodes):
            options = self._options[node.name]
            if len(options) > 1:
                low = max((chunk for value in _results(node) for chunk in wanted[value]), default=0)
                options = [chunk for chunk in options if chunk >= low]
            chunk = options[0]
            if chunk != options[-1]:
                alone = {v for v in self.driven(node) if chunk not in wanted[v] and expected.alone(node, v, chunk)}
                chunk = self._cheaper(node, chunk, options[-1], alone, wanted)
            self.home[node.name] = chunk
            for value in self.driven(node):
                wanted[value].add(chunk)

    def _wanted_results(self) -> defaultdict[Value, set[int]]:
        """The chunk where each part of a parameter's gradient is needed: that of the parameter."""
        wanted: defaultdict[Value, set[int]] = defaultdict(set)
        names = {node.target: node.name for node in self.graph.placeholders("param")}
        for path, values in self.parts.items():
            for value in values:
                top = self._tops.get(value.node, self.count - 1)
                wanted[value].add(max((chunk for chunk in self.owners[names[path]] if chunk <= top), default=top))
        return wanted

    def lowest(self, nodes: list[Node]) -> dict[str, int]:
        """The first chunk that each backward operation could be in if all its users were as early as they can be."""
        wanted, lowest = self._wanted_results(), {}
        for node in reversed(nodes):
            low = max((chunk for value in _results(node) for chunk in wanted[value]), default=0)
            lowest[node.name] = next(chunk for chunk in self._options[node.name] if chunk >= low)
            for value in self.driven(node):
                wanted[value].add(lowest[node.name])
        return lowest

    def _cheaper(self, node: Node, low: int, high: int, alone: set[Value], wanted: Mapping[Value, set[int]]) -> int:
        """``low``, unless the gradients that would be sent for this operation alone have more bytes than its
        results."""
        arriving = [v for v in alone if self._tops[v.node] > low and not self.graph[v.node].is_placeholder]
        leaving = [value for value in _results(node) if any(chunk < high for chunk in wanted[value])]
        received, sent = (sum(int(self.graph.type_of(v).bytes) for v in values) for values in (arriving, leaving))
        return low if received <= sent else high


class _Expected:
    """Where operations that have no chunk yet are expected to be. Few operations have several chunks to choose from, so
    it is computed when it is first asked for."""

    def __init__(self, layout: ChunkLayout, nodes: list[Node]) -> None:
        self.layout, self.nodes = layout, nodes

    @cached_property
    def lowest(self) -> Mapping[str, int]:
        return self.layout.lowest(self.nodes)

    @cached_property
    def users(self) -> Mapping[Value, set[str]]:
        """The operations that read each gradient."""
        users: defaultdict[Value, set[str]] = defaultdict(set)
        for node in self.nodes:
            for value in self.layout.driven(node):
                users[value].add(node.name)
        return users

    def alone(self, node: Node, value: Value, chunk: int) -> bool:
        """Whether no operation but ``node`` that has no chunk yet is expected to read ``value`` in ``chunk``."""
        others = (user for user in self.users[value] if user != node.name and user not in self.layout.home)
        return not any(self.lowest[user] == chunk for user in others)


def _results(node: Node) -> list[Value]:
    return [Value(node.name, index) for index in range(len(node.types))]


def _common(places: Iterable[Chunks | None]) -> Chunks | None:
    """The chunks in all of ``places``, None representing all."""
    common: Chunks | None = None
    for chunks in places:
        if chunks is not None:
            common = chunks if common is None else common & chunks
    return common
