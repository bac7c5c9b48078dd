"""Cuts the graph of one microbatch into chunks for the stages of a pipeline.

:mod:`.chunk_assignment` decides which operation belongs to which chunk; this module writes the graphs. Each chunk has
the placeholders it reads, and repeats views and operations that depend on data alone (``<name>_at<chunk>``). It
receives all other values directly from the chunk that computes them. A parameter that several chunks use is a
placeholder in each, and each returns its own part of the gradient.

    %x: f32[2, 4] = input("x")                       chunk 0: ... return send "y" = %y
    %y: f32[2, 4] = aten.mm.default(%x, %a)     ->
    %z: f32[2, 4] = aten.mm.default(%y, %b)          chunk 1: %y: f32[2, 4] = receive("y")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Output, Phase, Value, copy_for_chunk, fresh_name
from autopar.ir.program import is_random
from autopar.ir.staged_graph import Edge, Staged

from .chunk_assignment import ChunkLayout
from .data_only import data_only_nodes
from .microbatch import Microbatched


def wire_name(value: Value) -> str:
    """The name under which a value is sent: that of its node, with the index of a result that is not the first."""
    return value.node if value.index == 0 else f"{value.node}_result{value.index}"


def sent_node(name: str) -> str:
    """The node whose value is sent under a :func:`wire_name`.

    >>> sent_node("attention_backward_result2"), sent_node("mm_2")
    ('attention_backward', 'mm_2')
    """
    node, result, number = name.rpartition("_result")
    return node if result and number.isdecimal() else name


def cut(source: Graph | Microbatched, cuts: tuple[str, ...], unused: Mapping[str, int] | None = None) -> Staged:
    """Cuts ``source`` (concrete, without saved activations) into chunks. ``cuts``: the names of the forward operations
    that begin chunk 1, 2, ... ``unused``: the chunks, by path, of parameters that no operation uses.

    Raises :class:`OptionsError` for names that are not forward operations in the order of the graph, or if a cut
    separates the operations that read and write one buffer.
    """
    graph = source if isinstance(source, Graph) else source.graph
    prelude = None if isinstance(source, Graph) else source.prelude
    own = not isinstance(source, Graph) and source.own_statistics
    if not cuts:
        owners = {node.target: (0,) for node in graph.placeholders("param")}
        return Staged((graph,), (), owners, prelude, own)
    layout = ChunkLayout(graph, tuple(cuts), unused=unused or {})
    writers = [_Writer(layout, chunk) for chunk in range(layout.count)]
    for writer in writers:
        writer.write()
    _mutations(layout, writers)
    chunks, edges = _connected(layout, writers)
    users: dict[str, tuple[int, ...]] = {node.target: () for node in _parameters(graph)}
    for index, chunk in enumerate(chunks):
        for path in dict.fromkeys(node.target for node in _parameters(chunk)):
            users[path] = (*users[path], index)
    return Staged(chunks, edges, users, prelude, own)


def split_backward(chunk: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the backward operations that gradients sent to other chunks (or returned for inputs) depend on, and of
    those that only gradients of parameters depend on."""
    urgent = [
        output.value
        for output in chunk.outputs
        if output.value is not None
        and (
            output.kind == "input_gradient" or (output.kind == "send" and chunk[output.value.node].phase == "backward")
        )
    ]
    needed = chunk.needed_for(urgent)
    backward = {node.name for node in chunk if node.phase == "backward" and not node.is_placeholder}
    return frozenset(backward & needed), frozenset(backward - needed)


def _parameters(graph: Graph) -> tuple[Node, ...]:
    return graph.placeholders("param")


@dataclass
class _Writer:
    """Writes one chunk. ``received``: the values it needs from others; ``local``: the names of values in this chunk."""

    layout: ChunkLayout
    chunk: int
    nodes: list[Node] = field(default_factory=list)
    placeholders: dict[str, Node] = field(default_factory=dict)
    received: dict[Value, Node] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    local: dict[Value, Value] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.layout.graph

    def write(self) -> None:
        """Writes all operations of the chunk, forward first, and its outputs."""
        for phase in ("forward", "backward"):
            for node in self.layout.members.get(self.chunk, ()):
                if node.phase == phase and not (phase == "backward" and node.name in self.layout.repeated):
                    self._emit(node, node.name, node.phase)
        for output in self.graph.outputs:
            if output.kind == "gradient":
                if self.chunk in self.layout.gradient_chunks[output.name]:
                    self._gradient(output.name)
            elif output.kind != "mutation" and self._returns(output):
                value = output.value and self.take(output.value, "backward")
                self.outputs.append(replace(output, value=value))

    def _returns(self, output: Output) -> bool:
        return self.chunk == (0 if output.value is None else self.layout.home.get(output.value.node, 0))

    def _gradient(self, path: str) -> None:
        """Writes the part of a gradient that is computed here."""
        node = self.layout.parameters[path]
        owners = self.layout.owners[node.name]
        parts = self.layout.parts[path]
        if not parts:
            self.take(Value(node.name), "forward")
            self.outputs.append(Output("gradient", path, None))
            return
        at = [self.layout.home.get(part.node, min(owners, default=0)) for part in parts]
        own = [self.take(part, "backward") for part, chunk in zip(parts, at, strict=True) if chunk == self.chunk]
        if own:
            self.take(Value(node.name), "forward")
            self.outputs.append(Output("gradient", path, self._sum(own, node)))

    def _sum(self, values: list[Value], parameter: Node) -> Value:
        total = values[0]
        for value in values[1:]:
            name = self._fresh(f"{value.node}_sum")
            self.nodes.append(
                Node(
                    name=name,
                    op="aten.add.Tensor",
                    args=(total, value),
                    kwargs=(),
                    types=parameter.types,
                    module=parameter.module,
                    source="",
                    phase="backward",
                )
            )
            total = Value(name)
        return total

    def take(self, value: Value, phase: Phase) -> Value:
        """The name of ``value`` in this chunk; repeats or receives it if it is not computed here."""
        if value not in self.local:
            node, received = self.graph[value.node], self.layout.received_for(value, self.chunk)
            if received is not None:
                self.local[value] = self.take(received, phase)
            elif node.is_placeholder:
                self.placeholders[node.name] = node
                self.local[value] = value
            elif node.name in self.layout.repeated or self._is_later(node):
                self._emit(node, self._fresh(copy_for_chunk(node.name, self.chunk)), phase)
            else:
                kind, name = self.graph.type_of(value), wire_name(value)
                self.received[value] = Node(
                    name=name,
                    op="receive",
                    args=(name,),
                    kwargs=(),
                    types=(kind,),
                    module=node.module,
                    source=node.source,
                    phase=node.phase,
                )
                self.local[value] = Value(name)
        return self.local[value]

    def _is_later(self, node: Node) -> bool:
        """Whether it is a forward operation of a later chunk, whose result backward needs here: it can only be
        recomputed. Raises :class:`OptionsError` for random operations."""
        is_later = node.phase == "forward" and self.layout.home[node.name] > self.chunk
        if is_later and is_random(node.op):
            raise OptionsError(f"cannot cut so: backward of an earlier stage needs the random %{node.name} = {node.op}")
        return is_later

    def _emit(self, node: Node, name: str, phase: Phase) -> None:
        named = node.map_values(lambda value: self.take(value, phase))
        same = (named.name, named.phase) == (name, phase)
        self.nodes.append(named if same else named.named(name, phase))
        for index in range(len(node.types)):
            value = Value(node.name, index)
            self.local[value] = value if name == node.name else Value(name, index)

    def _fresh(self, name: str) -> str:
        return fresh_name(name, self.taken, self.graph)

    def finished(self, sends: Iterable[Value]) -> Graph:
        """The chunk's graph, without dead nodes; ``sends``: the values that other chunks need."""
        sent = tuple(Output("send", wire_name(value), self.local[value]) for value in sends)
        own = sorted(self.placeholders.values(), key=lambda node: self.layout.order[node.name])
        nodes = (*own, *self.received.values(), *self.nodes)
        graph = Graph(nodes, (*self.outputs, *sent))
        kept = {o.name for o in graph.outputs if o.kind == "gradient"}
        needed = graph.needed_for(graph.output_values)
        alive = tuple(n for n in nodes if n.name in needed or (n.op == "param" and n.target in kept))
        constants = {n.name: self.graph.constants[n.name] for n in alive if n.op == "constant"}
        return Graph(alive, graph.outputs, (), constants)


def _connected(layout: ChunkLayout, writers: list[_Writer]) -> tuple[tuple[Graph, ...], tuple[Edge, ...]]:
    """The chunks and the edges between them, after removing edges that no chunk needs."""
    wants = [set(writer.received) for writer in writers]
    finished: dict[int, tuple[list[Value], Graph]] = {}
    while True:
        sends: list[list[Value]] = [[] for _ in writers]
        for value in dict.fromkeys(v for want in wants for v in want):
            sends[layout.home[value.node]].append(value)
        for writer, values in enumerate(sends):
            values.sort(key=lambda value: (layout.order[value.node], value.index))
            if writer not in finished or finished[writer][0] != values:
                finished[writer] = values, writers[writer].finished(values)
        chunks = [finished[writer][1] for writer in range(len(writers))]
        alive = [{v for v, n in w.received.items() if n.name in c} for w, c in zip(writers, chunks, strict=True)]
        if alive == wants:
            break
        wants = alive
    edges = [
        Edge(layout.home[value.node], target, wire_name(value)) for target, want in enumerate(wants) for value in want
    ]
    return _with_idle_parameters(layout.graph, chunks), tuple(sorted(edges))


def _with_idle_parameters(graph: Graph, chunks: list[Graph]) -> tuple[Graph, ...]:
    """Adds parameters that nothing uses to the first chunk."""
    used = {node.target for chunk in chunks for node in chunk.placeholders("param")}
    idle = tuple(node for node in _parameters(graph) if node.target not in used)
    first = replace(chunks[0], nodes=(*idle, *chunks[0].nodes))
    return tuple(chunk.verify() for chunk in (first, *chunks[1:]))


def _mutations(layout: ChunkLayout, writers: list[_Writer]) -> None:
    """Writes new values of buffers where the buffer is read: in every such chunk if they depend on data alone."""
    data = data_only_nodes(layout.graph)
    kept = (*layout.graph.placeholders("buffer"), *layout.graph.placeholders("cache"))
    buffers = {node.target: node.name for node in kept}
    for output in layout.graph.outputs:
        if output.kind != "mutation" or output.value is None:
            continue
        name = buffers.get(output.name)
        readers = {writer.chunk for writer in writers if name in writer.placeholders}
        home = layout.home.get(output.value.node, min(readers, default=0))
        if output.value.node not in data and readers - {home}:
            raise OptionsError(
                f"cannot cut so: stage {min(readers - {home})} reads the buffer {output.name!r} that stage {home} "
                f"changes; put the cut before or after both"
            )
        chunks = readers | {home} if output.value.node in data else {home}
        for chunk in sorted(chunks):
            value = writers[chunk].take(output.value, "forward")
            writers[chunk].outputs.append(replace(output, value=value))
