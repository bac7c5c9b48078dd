"""Groups operations into kernels: what each kernel reads and writes, and which values forward saves for backward.

Elementwise operations, reductions and copies that follow each other are one kernel. It reads values from outside and
writes values that are used outside. Matrix products, attention, lookups and the like are separate kernels. Two
operations share a kernel only if no path between them goes through another kernel or a collective: each operation has a
*depth*, the most kernels on a path to it, and a kernel is a connected set of equal depth.

Of values that forward would save for elementwise use in backward, some are recomputed there (:mod:`.recomputed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from .kernel import Kernel, Kernels, is_alias, is_heavy, is_lookup, origin, real_operands, users_of
from .recomputed import Alone, Size, with_recomputed
from .reductions import Late, without_reductions_across

Moves = Callable[[Node, Node], bool]
_CONCATENATION = "aten.cat.default"


def _nothing(node: Node) -> bool:
    return False


@dataclass(frozen=True)
class Fusing:
    """What shares kernels.

    ``mixes``: reductions across rows with what they reduce (:mod:`.reductions`). ``looks_up``: look-ups with what takes
    the rows. ``one_hot``: rows with one entry, which are scattered into zeros, with what reads them. ``joined``:
    concatenations with what reads them. ``kept(node)``: whether forward saves results of the node even if they could be
    recomputed."""

    mixes: bool = True
    looks_up: bool = False
    one_hot: bool = True
    joined: bool = True
    kept: Alone = _nothing


def find_kernels(graph: Graph, moves: Moves, eager: Alone, size: Size, fusing: Fusing | None = None) -> Kernels:
    """The kernels of a concrete graph with saved activations. ``moves(producer, consumer)``: whether a value is
    resharded between two operations, or they should not share a kernel for another reason; ``eager(node)``: whether an
    operation runs alone; ``size(value)``: bytes of a value on a device if it is saved."""
    fusing = fusing or Fusing()

    def fuses(node: Node) -> bool:
        return recomputes(node) or (fusing.looks_up and is_lookup(node) and not eager(node))

    def recomputes(node: Node) -> bool:
        return not eager(node) and (not is_heavy(node) or _is_one_hot(graph, node))

    late = Late(graph, fuses)

    def joins(producer: Node, consumer: Node) -> bool:
        light = fuses(producer) and fuses(consumer)
        if not light or producer.phase != consumer.phase or moves(producer, consumer):
            return False
        if producer.op == _CONCATENATION and not fusing.joined:
            return False
        return late.may_follow(producer, consumer) and (fusing.one_hot or not is_heavy(producer))

    users = users_of(graph)
    grouped = list(_grouped(graph, users, joins, size))
    if not fusing.mixes:
        grouped = [part for kernel in grouped for part in _divided(graph, kernel, users, joins)]
    return with_recomputed(graph, _in_order(graph, grouped), users, recomputes, fusing.kept, size)


def _divided(graph: Graph, kernel: Kernel, users: Mapping[Value, list[Node]], joins: Moves) -> Iterator[Kernel]:
    """A kernel in parts: its reductions across rows, and the rest."""
    rest, apart = without_reductions_across(graph, kernel, users)
    if not apart:
        yield kernel
        return
    others = frozenset(node.name for part in apart for node in part.nodes)
    results = {value for part in apart for value in part.reads}
    results |= {origin(graph, value) for value in graph.output_values}
    for nodes in _connected(graph, rest, joins):
        yield _kernel(graph, nodes, users, results, others)
    yield from apart


def _in_order(graph: Graph, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Orders kernels after those whose results they read, and otherwise by their last operations."""
    import networkx as nx

    place = {node.name: i for i, node in enumerate(graph.nodes)}
    writer = {node.name: i for i, kernel in enumerate(kernels) for node in kernel.nodes}
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(kernels)))
    order.add_edges_from(
        (writer[v.node], i) for i, kernel in enumerate(kernels) for v in kernel.reads if v.node in writer
    )
    ends = [max(place[node.name] for node in kernel.nodes) for kernel in kernels]
    return tuple(kernels[i] for i in nx.lexicographical_topological_sort(order, key=ends.__getitem__))


def _is_constant(graph: Graph, node: Node) -> bool:
    """Whether a node has no tensor operands."""
    return not node.is_placeholder and not is_alias(node) and not real_operands(graph, node)


def _is_one_hot(graph: Graph, node: Node) -> bool:
    """Whether a node scatters a number into a constant. Compilers compare indices instead (torch's inductor,
    ``scatter_upon_const_tensor``), and fused losses never write the result."""
    if node.op != "aten.scatter.value":
        return False
    return _is_constant(graph, graph[origin(graph, node.operands[0]).node])


def _grouped(graph: Graph, users: Mapping[Value, list[Node]], joins: Moves, size: Size) -> Iterator[Kernel]:
    """The kernels, the shallowest first. A kernel that reads no more bytes than it writes, such as a constant, sinks to
    the depth of the first kernel that reads its results, if it may fuse with all their readers: then the results need
    not be written."""
    depth, place = _depths(graph, joins), {node.name: i for i, node in enumerate(graph.nodes)}
    results = {origin(graph, value) for value in graph.output_values}
    levels: dict[int, list[Node]] = {}
    for name, level in depth.items():
        levels.setdefault(level, []).append(graph[name])
    # Readers of a kernel's results that may fuse with it are deeper, so a level that was handled stays as it is.
    for level in range(len(levels)):
        for nodes in _connected(graph, sorted(levels[level], key=lambda node: place[node.name]), joins):
            kernel, deeper = _kernel(graph, nodes, users, results), _least_reader_depth(nodes, depth, users, joins)
            if deeper is None or not _widens(kernel, size):
                yield kernel
            else:
                depth.update({node.name: deeper for node in nodes})
                levels[deeper] += nodes


def _least_reader_depth(
    nodes: Sequence[Node], depth: Mapping[str, int], users: Mapping[Value, list[Node]], joins: Moves
) -> int | None:
    """The least depth of a kernel that reads the results of these nodes; None if one of the readers cannot fuse with
    them."""
    inside = {node.name for node in nodes}
    uses = [
        (node, user)
        for node in nodes
        for index in range(len(node.types))
        for user in users.get(Value(node.name, index), ())
        if user.name not in inside
    ]
    if not uses or not all(joins(node, user) for node, user in uses):
        return None
    return min(depth[user.name] for _, user in uses)


def _widens(kernel: Kernel, size: Size) -> bool:
    return sum(map(size, kernel.reads)) <= sum(map(size, kernel.writes))


def _depths(graph: Graph, joins: Moves) -> dict[str, int]:
    """The most kernels on a path to each operation."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        if node.is_placeholder or is_alias(node):
            continue
        deepest = 0
        for value in real_operands(graph, node):
            producer = graph[value.node]
            if not producer.is_placeholder:
                step = 0 if joins(producer, node) else 1
                deepest = max(deepest, depth[producer.name] + step)
        depth[node.name] = deepest
    return depth


def _connected(graph: Graph, level: Sequence[Node], joins: Moves) -> Iterator[list[Node]]:
    """Splits operations of one depth, given in order, into connected sets."""
    import networkx as nx

    place = {node.name: i for i, node in enumerate(level)}
    links: nx.Graph[str] = nx.Graph()
    links.add_nodes_from(place)
    for node in level:
        producers = (value.node for value in real_operands(graph, node) if value.node in place)
        links.add_edges_from((producer, node.name) for producer in producers if joins(graph[producer], node))
    for names in nx.connected_components(links):
        yield [level[i] for i in sorted(map(place.__getitem__, names))]


def _kernel(
    graph: Graph,
    nodes: list[Node],
    users: Mapping[Value, list[Node]],
    results: Set[Value],
    others: Set[str] = frozenset(),
) -> Kernel:
    """The kernel of these nodes. It writes ``results``, and what is used outside, except by ``others`` alone, which
    compute it again."""
    inside = {node.name for node in nodes}
    known = inside | others
    reads = dict.fromkeys(value for node in nodes for value in real_operands(graph, node) if value.node not in inside)
    results_of_nodes = (Value(node.name, i) for node in nodes for i, kind in enumerate(node.types) if kind is not None)
    writes = [v for v in results_of_nodes if v in results or any(user.name not in known for user in users.get(v, ()))]
    return Kernel(tuple(nodes), tuple(reads), tuple(writes))
