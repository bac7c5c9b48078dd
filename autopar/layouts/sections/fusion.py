"""Groups operations into kernels: what each kernel reads and writes, and which values forward saves for backward.

Elementwise operations, reductions and copies that follow each other are one kernel. It reads values from outside and
writes values that are used outside. Matrix products, attention, lookups and the like are separate kernels. Two
operations share a kernel only if no path between them goes through another kernel or a collective: each operation has a
*depth*, the most kernels on a path to it, and a kernel is a connected set of equal depth.

Instead of saving a value for elementwise use in backward, the kernel that uses it *recomputes* it there, if its sources
take no more memory on a device and its own kernel reads or writes them anyway. Saved instead are the input of a
normalisation, the sum if a residual is added before it, and the two products of a gated activation. (Compilers find the
same by a minimum cut; fused kernels of training libraries are written so.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost import family_of
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, VIEWS, Node, Value

Moves = Callable[[Node, Node], bool]
Alone = Callable[[Node], bool]
Size = Callable[[Value], int]


@dataclass(frozen=True)
class Kernel:
    """Nodes that run as one kernel (views and saved activations among them are free). ``reads`` and ``writes``: the
    values that enter and leave it, views resolved to what they are views of."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]

    @property
    def phase(self) -> str:
        return self.nodes[0].phase

    @property
    def heavy(self) -> Node | None:
        """The operation, if it never shares its kernel."""
        return self.nodes[0] if len(self.nodes) == 1 and is_heavy(self.nodes[0]) else None


@dataclass(frozen=True)
class Kernels:
    """The kernels of a graph in order, and the values saved for backward. ``rematerialised``: values that backward
    recomputes, with their sources."""

    graph: Graph
    kernels: tuple[Kernel, ...]
    saved: tuple[Value, ...]
    rematerialised: Mapping[Value, tuple[Value, ...]] = field(default_factory=dict)

    @cached_property
    def of(self) -> Mapping[str, Kernel]:
        return {node.name: kernel for kernel in self.kernels for node in kernel.nodes}


def is_heavy(node: Node) -> bool:
    """Whether the node is a separate kernel."""
    family = family_of(node.op)
    name = node.op.split(".")[1] if "." in node.op else node.op
    return family.matrix is not None or name in _ALONE


_ALONE = frozenset(
    (
        *("embedding", "embedding_dense_backward", "gather_rows", "index", "index_put", "_unsafe_index_put"),
        *("index_add", "scatter", "scatter_add", "sort", "topk", "cumsum"),
        *("experts", "some_experts", "experts_backward", "some_experts_backward"),
    )
)


def is_alias(node: Node) -> bool:
    """Whether the node's result is its operand under another name: a view, or a saved activation."""
    return node.op in VIEWS or node.op == SAVED_ACTIVATION


def origin(graph: Graph, value: Value) -> Value:
    """The value that views and saved activations refer to."""
    node = graph[value.node]
    while is_alias(node):
        value = node.operands[0]
        node = graph[value.node]
    return value


def readers(graph: Graph, value: Value) -> Iterator[Node]:
    """The operations that read a value, also through views and as a saved activation."""
    for user, _ in graph.users.get(value, ()):
        if is_alias(user):
            yield from readers(graph, Value(user.name))
        else:
            yield user


def find_kernels(graph: Graph, moves: Moves, eager: Alone, size: Size) -> Kernels:
    """The kernels of a concrete graph with saved activations. ``moves(producer, consumer)``: whether a value is
    resharded between two operations, or they should not share a kernel for another reason; ``eager(node)``: whether an
    operation runs alone; ``size(value)``: bytes of a value on a device if it is saved."""

    def fuses(node: Node) -> bool:
        return not eager(node) and (not is_heavy(node) or _is_one_hot(graph, node))

    def joins(producer: Node, consumer: Node) -> bool:
        light = fuses(producer) and fuses(consumer)
        return light and producer.phase == consumer.phase and not moves(producer, consumer)

    users = _users(graph)
    kernels = _in_order(graph, list(_grouped(graph, users, joins, size)))
    return _with_recomputed(graph, kernels, users, fuses, size)


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
    return not node.is_placeholder and not is_alias(node) and not _real_operands(graph, node)


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
    levels: dict[int, list[Node]] = {}
    for name, level in depth.items():
        levels.setdefault(level, []).append(graph[name])
    # Readers of a kernel's results that may fuse with it are deeper, so a level that was handled stays as it is.
    for level in range(len(levels)):
        for nodes in _connected(graph, sorted(levels[level], key=lambda node: place[node.name]), joins):
            kernel, deeper = _kernel(graph, nodes, users), _least_reader_depth(nodes, depth, users, joins)
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


def _real_operands(graph: Graph, node: Node) -> list[Value]:
    return [origin(graph, value) for value in node.operands]


def _depths(graph: Graph, joins: Moves) -> dict[str, int]:
    """The most kernels on a path to each operation."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        if node.is_placeholder or is_alias(node):
            continue
        deepest = 0
        for value in _real_operands(graph, node):
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
        producers = (value.node for value in _real_operands(graph, node) if value.node in place)
        links.add_edges_from((producer, node.name) for producer in producers if joins(graph[producer], node))
    for names in nx.connected_components(links):
        yield [level[i] for i in sorted(map(place.__getitem__, names))]


def _users(graph: Graph) -> dict[Value, list[Node]]:
    """The operations that use each value, views resolved."""
    users: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if not is_alias(node):
            for value in dict.fromkeys(_real_operands(graph, node)):
                users.setdefault(value, []).append(node)
    return users


def _kernel(graph: Graph, nodes: list[Node], users: Mapping[Value, list[Node]]) -> Kernel:
    inside = {node.name for node in nodes}
    results = {origin(graph, value) for value in graph.output_values}
    reads = dict.fromkeys(value for node in nodes for value in _real_operands(graph, node) if value.node not in inside)
    results_of_nodes = (Value(node.name, i) for node in nodes for i, kind in enumerate(node.types) if kind is not None)
    writes = [v for v in results_of_nodes if v in results or any(user.name not in inside for user in users.get(v, ()))]
    return Kernel(tuple(nodes), tuple(reads), tuple(writes))


def _with_recomputed(
    graph: Graph, kernels: tuple[Kernel, ...], users: Mapping[Value, list[Node]], fusable: Alone, size: Size
) -> Kernels:
    """Decides kernel by kernel, the last first, which values are saved and which are recomputed."""
    wanted = dict.fromkeys(_saved_for_backward(graph, users))
    rematerialised: dict[Value, tuple[Value, ...]] = {}
    for kernel in reversed(kernels):
        if kernel.phase != "forward" or not fusable(kernel.nodes[0]):
            continue
        candidates = [v for v in kernel.writes if v in wanted and all(map(fusable, _users_in_backward(v, users)))]
        # From the kernel's inputs, or from results that it writes for forward anyway: the sum, if a residual is added
        # before a normalisation.
        written = {v for v in kernel.writes if v not in candidates}
        ways = [{v: _sources(graph, v, kernel, stops) for v in candidates} for stops in (set[Value](), written)]
        needed = [_needed(graph, sources) for sources in ways]
        prices = [sum(size(s) for s in sources if s not in wanted) for sources in needed]
        best = prices.index(min(prices))
        if candidates and prices[best] <= sum(map(size, candidates)):
            rematerialised.update(ways[best])
            for value in candidates:
                del wanted[value]
            wanted.update(needed[best])
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    saved = tuple(sorted(wanted, key=lambda v: (order[v.node], v.index)))
    return Kernels(
        graph, tuple(_rematerialising(kernel, rematerialised, users) for kernel in kernels), saved, rematerialised
    )


def _saved_for_backward(graph: Graph, users: Mapping[Value, list[Node]]) -> Iterable[Value]:
    for value, nodes in users.items():
        node = graph[value.node]
        if node.phase == "forward" and not node.is_placeholder and any(user.phase == "backward" for user in nodes):
            yield value


def _users_in_backward(value: Value, users: Mapping[Value, list[Node]]) -> list[Node]:
    return [user for user in users.get(value, ()) if user.phase == "backward"]


def _needed(graph: Graph, sources: Mapping[Value, tuple[Value, ...]]) -> dict[Value, None]:
    """The sources that must be saved; parameters and inputs exist anyway."""
    return dict.fromkeys(s for values in sources.values() for s in values if not graph[s.node].is_placeholder)


def _sources(graph: Graph, value: Value, kernel: Kernel, stops: Set[Value]) -> tuple[Value, ...]:
    """The values from outside the kernel, or among its results ``stops``, from which it computes ``value``."""
    inside = {node.name for node in kernel.nodes}
    needed, sources = {value.node}, dict[Value, None]()
    for node in reversed(kernel.nodes):
        if node.name in needed:
            for operand in _real_operands(graph, node):
                if operand.node in inside and operand not in stops:
                    needed.add(operand.node)
                else:
                    sources[operand] = None
    return tuple(sources)


def _rematerialising(
    kernel: Kernel, rematerialised: Mapping[Value, tuple[Value, ...]], users: Mapping[Value, list[Node]]
) -> Kernel:
    """The kernel, reading the sources of recomputed values, and not writing values that only backward would read."""
    inside = {node.name for node in kernel.nodes}
    reads = dict.fromkeys(s for value in kernel.reads for s in _from(value, kernel, rematerialised))

    def is_read(value: Value) -> bool:
        later = (user for user in users.get(value, ()) if user.name not in inside)
        return value not in rematerialised or any(user.phase == "forward" for user in later)

    return Kernel(kernel.nodes, tuple(reads), tuple(filter(is_read, kernel.writes)))


def _from(value: Value, kernel: Kernel, rematerialised: Mapping[Value, tuple[Value, ...]]) -> tuple[Value, ...]:
    return rematerialised.get(value, (value,)) if kernel.phase == "backward" else (value,)
