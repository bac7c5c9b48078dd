"""From placements of an uncut graph to placements of its pipeline chunks.

The placement program is solved for the graph of a microbatch, as if all of it ran on the mesh inside one stage: once
for equal stages, and for each kind of unequal ones. Cutting the graph leaves every choice as it is; a chunk has those
of its stage. In addition, values that are sent between stages need a placement on the wire. The sender reshards to the
wire's placement, each rank sends its shard to its counterpart (to those that have parts of it, if the other mesh is
another: the placement reads on both), and the receiver reshards to what its operations need. If both ends are
replicated, a sharded wire sends each byte once and gathers it inside the receiving stage (the scatter/gather
optimisation of Narayanan et al., SC'21, section 4.1). Wires are chosen by price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, Phase, TensorType, Value, original
from autopar.ir.placements import Placements, Strategy
from autopar.ir.stage_meshes import StageMeshes, on_axes
from autopar.ir.staged_graph import Edge, Staged
from autopar.ir.wire_pieces import Layout, busiest_elements
from autopar.passes.annotate.annotate import annotate
from autopar.passes.recompute.recompute import recomputed
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.prices import Prices, local_bytes


@dataclass(frozen=True)
class Chunk:
    """One chunk: its ``graph``, with a node for each saved activation, and the choice for each of its nodes."""

    index: int
    graph: Graph
    assignment: Assignment


def meshes_of(chunks: Sequence[Chunk], placement: tuple[int, ...]) -> StageMeshes:
    """The mesh of each pipeline rank. ``placement``: chunk to rank."""
    meshes = {rank: chunk.assignment.mesh for rank, chunk in zip(placement, chunks, strict=True)}
    return StageMeshes(tuple(meshes[rank] for rank in range(len(meshes))))


@dataclass(frozen=True)
class WirePrice:
    """The price of a message between two stages: ``seconds = latency + bytes / bandwidth``, where ``bytes`` are those
    that one rank sends."""

    latency: float
    bandwidth: float


WirePrices = Mapping[tuple[int, int], WirePrice]


def place_chunks(
    staged: Staged,
    uncut: Sequence[Assignment],
    prices: Sequence[Prices],
    links: WirePrices,
    fixed: Mapping[Edge, Placements] | None = None,
) -> tuple[tuple[Chunk, ...], dict[Edge, Placements]]:
    """The chunks of ``staged`` with the choices of ``uncut``, by chunk an assignment of the uncut graph on the mesh of
    its stage, and the placement of every edge on the wire: the ``fixed`` one, or one chosen by price. ``prices``: of
    each chunk's stage; ``links``: by (source, target) chunk."""
    fixed, prices = fixed or {}, [own.uncompiled for own in prices]
    saving = [SaveActivations()(graph) for graph in staged.chunks]
    recomputing = [
        recomputed(graph, _carried(graph, assignment, own))
        for graph, assignment, own in zip(saving, uncut, prices, strict=True)
    ]
    graphs, bare = [graph for graph, _ in recomputing], [assignment for _, assignment in recomputing]
    senders = [_sent_values(graph) for graph in graphs]
    wires: dict[Edge, Placements] = {}
    for edge in sorted(staged.edges):
        value = senders[edge.source][edge.name]
        home, kind = bare[edge.source].placements_of(value), graphs[edge.source].type_of(value)
        needs = _needs(graphs[edge.target], bare[edge.target], edge.name)
        link = links[edge.source, edge.target]
        ends = prices[edge.source], prices[edge.target]
        wires[edge] = fixed.get(edge) or best_wire(kind, home, needs, ends, link)
    chunks = [
        Chunk(index, graph, _with_wires(index, graph, assignment, wires))
        for index, (graph, assignment) in enumerate(zip(graphs, bare, strict=True))
    ]
    return tuple(chunks), wires


def _sent_values(graph: Graph) -> dict[str, Value]:
    return {o.name: o.value for o in graph.outputs if o.kind == "send" and o.value is not None}


def _with_wires(index: int, graph: Graph, assignment: Assignment, wires: Mapping[Edge, Placements]) -> Assignment:
    """The assignment in which the values that the chunk receives and sends have their placements on the wire."""
    received = {edge.name: place for edge, place in wires.items() if edge.target == index}
    strategies = dict(assignment.strategies)
    for node in graph.placeholders("receive"):
        strategies[node.name] = Strategy((), (on_axes(received[node.target], assignment.mesh),))
    sends: dict[str, dict[Placements, None]] = {}
    for edge, place in wires.items():
        if edge.source == index:
            sends.setdefault(edge.name, {})[on_axes(place, assignment.mesh)] = None
    return replace(assignment, strategies=strategies, sends={name: tuple(places) for name, places in sends.items()})


def _carried(graph: Graph, uncut: Assignment, prices: Prices) -> Assignment:
    """The choices of ``uncut`` for the nodes of a chunk, by name. A node that cutting added takes the strategy that is
    cheapest, reshards of its operands included."""
    parameters = {n.name: uncut.parameters[original(n.name, uncut.parameters)] for n in graph.placeholders("param")}
    strategies: dict[str, Strategy] = {}
    annotated: Graph | None = None
    for node in graph.nodes:
        if node.op in ("param", "receive"):
            continue
        strategy = uncut.strategies.get(original(node.name, uncut.strategies))
        homes = [_home(value, strategies, parameters) for value in node.operands]
        if strategy is None and node.op == SAVED_ACTIVATION and homes[0] is not None:
            strategy = _resting(homes[0])
        if strategy is None:
            annotated = annotated or annotate(graph, uncut.mesh, prices.shares)
            strategy = _nearest(node, graph, annotated.strategies[node.name], homes, prices)
        strategies[node.name] = strategy
    away = [
        frozenset(n.name for n in graph.nodes if original(n.name, names) in names)
        for names in (dict.fromkeys(uncut.recomputed), dict.fromkeys(uncut.offloaded))
    ]
    return Assignment(uncut.mesh, strategies, parameters, recomputed=away[0], offloaded=away[1])


def _home(value: Value, strategies: Mapping[str, Strategy], parameters: Mapping[str, object]) -> Placements | None:
    """The placement of an operand; None if it is received (its placement on the wire is chosen later) or a
    parameter."""
    strategy = strategies.get(value.node)
    return None if strategy is None or value.node in parameters else strategy.outputs[value.index]


def _resting(home: Placements) -> Strategy:
    return Strategy((home,), (home,))


def _nearest(
    node: Node, graph: Graph, strategies: tuple[Strategy, ...], homes: list[Placements | None], prices: Prices
) -> Strategy:
    def seconds(strategy: Strategy) -> float:
        kinds = tuple(graph.type_of(value) for value in node.operands)
        moved = sum(
            prices.table(kind).cost(home, need)
            for kind, home, need in zip(kinds, homes, strategy.inputs, strict=True)
            if home is not None and home != need
        )
        return moved + prices.node(node, kinds, strategy)

    return min(strategies, key=seconds)


def _needs(graph: Graph, assignment: Assignment, name: str) -> tuple[tuple[Phase, Placements], ...]:
    """The placements in which the received value ``name`` is needed, each once per phase."""
    node = next(n for n in graph.placeholders("receive") if n.target == name)
    return tuple(dict.fromkeys(_all_needs(graph, assignment, Value(node.name))))


def _all_needs(graph: Graph, assignment: Assignment, value: Value) -> Iterator[tuple[Phase, Placements]]:
    for user, operand in graph.users.get(value, ()):
        yield user.phase, assignment.strategies[user.name].inputs[operand]
    for output in graph.outputs:
        if output.value == value and output.kind in ("output", "mutation"):
            yield graph[value.node].phase, assignment.place_of_result(graph, output)


def best_wire(
    kind: TensorType,
    home: Placements,
    needs: tuple[tuple[Phase, Placements], ...],
    ends: tuple[Prices, Prices],
    link: WirePrice,
) -> Placements:
    """The placement in which sending a value costs least. The sender reshards it from ``home``, the receiver to each of
    ``needs``. Partial sums are reduced first; otherwise each rank would send a whole tensor. ``ends``: the prices of
    the sender and of the receiver."""
    sender, receiver = ends
    before, after = sender.table(kind), receiver.table(kind)

    def seconds(place: Placements) -> float:
        wire = link.latency + wire_bytes(kind, place, sender.mesh, receiver.mesh) / link.bandwidth
        sent, taken = on_axes(place, sender.mesh), on_axes(place, receiver.mesh)
        return before.cost(home, sent) + wire + sum(after.cost(taken, need) for _, need in needs)

    states = [
        place
        for place in dict.fromkeys((*before.states, *after.states))
        if not any(isinstance(placement, Partial) for placement in place)
        and on_axes(place, sender.mesh) in before.index
        and on_axes(place, receiver.mesh) in after.index
    ]
    return min(states, key=lambda place: (seconds(place), str(place)))


def edge_bytes(chunks: Sequence[Chunk], wires: Mapping[Edge, Placements]) -> dict[Edge, int]:
    """:func:`wire_bytes` of each edge between ``chunks``, for one microbatch."""
    received = [{n.target: n.type for n in chunk.graph.placeholders("receive")} for chunk in chunks]
    meshes = [chunk.assignment.mesh for chunk in chunks]
    return {
        edge: wire_bytes(received[edge.target][edge.name], place, meshes[edge.source], meshes[edge.target])
        for edge, place in wires.items()
    }


def wire_bytes(kind: TensorType, place: Placements, source: tuple[int, ...], target: tuple[int, ...]) -> int:
    """The most bytes that one device sends or receives of a value whose wire is placed so on the meshes of both
    ends."""
    if source == target:
        return local_bytes(kind, place, source)
    ends = (Layout(on_axes(place, mesh), mesh) for mesh in (source, target))
    return busiest_elements(tuple(map(int, kind.shape)), *ends) * kind.dtype.itemsize
