"""The bill of an assignment: what a step costs, line by line. The solver's objective is the sum of the same lines.

Lines come from walking the whole graph, not from the solver's arrays, so that
objective == sum of lines is a check and not a tautology.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import Partial

from autopar.cost import collective_seconds

from .assignment import Assignment, ParameterPlacement, travels_unseen, uses
from .graph import REST, VIEWS, Graph, Node, Phase, TensorType, Value
from .optimizers import optimizer_bytes
from .plan import LineKind
from .prices import Prices, local_bytes, local_type
from .repeats import ONCE, Repeats
from .reshard import Collective, Hop, make_hop
from .spec import Placements, Strategy
from .windows import Beside, Priced, sides_of_sections, windows_of


@dataclass(frozen=True, slots=True)
class Line:
    """One priced item: ``name`` is the node computed, or the value moved by ``hops``; ``times`` in a step, which takes
    ``seconds`` in all. A ``hidden`` one takes back (below zero) what travels while the step computes."""

    kind: LineKind
    name: str
    module: str
    phase: Phase
    seconds: float
    hops: tuple[Hop, ...] = ()
    times: int = 1

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(hop.collective for hop in self.hops if hop.collective is not None)


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes on the device that holds most, by part; ``host``: bytes of optimizer state in host memory, which are
    not among them."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    inputs: int
    host: int = 0

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary + self.inputs


@dataclass(frozen=True)
class Account:
    """All lines of a step, and its memory."""

    lines: tuple[Line, ...]
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    def seconds_of(self, *kinds: LineKind) -> float:
        return sum(line.seconds for line in self.lines if line.kind in kinds)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A parameter that another chunk stores and updates. ``apart``: on other devices, which send it here once a step
    and are sent its gradient, in ``seconds``."""

    apart: bool
    seconds: float = 0.0


# By path, the parameters of a chunk that it does not store.
Loans = Mapping[str, Borrowed]
NO_LOANS: Loans = {}


def optimizer_seconds(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> float:
    """One update of a parameter: reads value, gradient and states, writes value and states; of a
    scaled loss it also looks for what overflowed in the gradient, reads it again to divide it, and writes it."""
    shard = local_type(node.stored, place.optimizer, prices.mesh)
    moved = (6 if node.is_scaled else 3) * int(shard.bytes) + 2 * int(optimizer_bytes(optimizer, shard))
    return moved / prices.cluster.device.updates


def agreement_seconds(prices: Prices, graphs: Iterable[Graph], stages: int = 1) -> float:
    """All devices of all ``stages`` telling each other, once a step, whether a gradient of the scaled loss overflowed.
    ``graphs`` make up the step."""
    if not any(node.is_scaled for graph in graphs for node in graph.placeholders("param")):
        return 0.0
    mesh = (stages, *prices.mesh)
    axes = tuple(axis for axis, devices in enumerate(mesh) if devices > 1)
    return collective_seconds(prices.cluster, mesh, "all_reduce", axes, torch.float32.itemsize) if axes else 0.0


def casting_seconds(prices: Prices, node: Node, place: ParameterPlacement) -> float:
    """Making, once a step, the copy of a stored parameter that the graph reads in another dtype."""
    if node.stored == node.type:
        return 0.0
    moved = sum(local_bytes(kind, place.optimizer, prices.mesh) for kind in (node.stored, node.type))
    device = prices.cluster.device
    return device.launch_seconds + moved / device.memory_bandwidth


def parameter_bytes(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> tuple[int, int, int]:
    """Bytes on a device of (weights, gradients, optimizer state) of one trained parameter. A working weight kept beside
    the stored shard, elsewhere or in another dtype, counts as weight; state in host memory does not count."""
    shard = local_type(node.stored, place.optimizer, prices.mesh)
    apart = place.weight != place.optimizer or node.stored != node.type
    working = local_bytes(node.type, place.weight, prices.mesh) if apart else 0
    gradient = local_bytes(node.stored, place.gradient, prices.mesh)
    state = 0 if place.offload else int(optimizer_bytes(optimizer, shard))
    return int(shard.bytes) + working, gradient, state


def offloaded_bytes(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> int:
    """Bytes of a parameter's optimizer state that rest in host memory, and visit the device while it is updated."""
    return (
        int(optimizer_bytes(optimizer, local_type(node.stored, place.optimizer, prices.mesh))) if place.offload else 0
    )


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Optimizer state in host memory: ``bytes`` in all, and of the ``largest``, which visits the device alone."""

    bytes: int = 0
    largest: int = 0


def host_memory(
    graph: Graph, assignment: Assignment, prices: Prices, optimizer: str, loans: Loans = NO_LOANS
) -> HostMemory:
    """What ``assignment`` leaves in the host memory of each device."""
    counts = [
        offloaded_bytes(prices, node, assignment.parameters[node.name], optimizer)
        for path, node in ((path, graph.parameters[path]) for path in trained(graph))
        if path not in loans
    ]
    return HostMemory(sum(counts), max(counts, default=0))


def offload_seconds(prices: Prices, node: Node, place: ParameterPlacement, optimizer: str) -> float:
    """To bring the state of a parameter to the device and back, one after the other: a parameter's update lasts
    nothing beside that."""
    count, device = offloaded_bytes(prices, node, place, optimizer), prices.cluster.device
    return 2 * (device.launch_seconds + count / device.host_bandwidth) if count else 0.0


def held_bytes(
    prices: Prices, node: Node, place: ParameterPlacement, optimizer: str, loans: Loans
) -> tuple[int, int, int]:
    """:func:`parameter_bytes` of the parameter ``node``, without what whoever lends it counts: the optimizer state, and
    on the same devices the stored tensor."""
    weight, gradient, state = parameter_bytes(prices, node, place, optimizer)
    loan = loans.get(node.target)
    if loan is None:
        return weight, gradient, state
    stored = 0 if loan.apart else local_bytes(node.stored, place.optimizer, prices.mesh)
    return weight - stored, gradient, 0


def temporary_bytes(prices: Prices, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy) -> int:
    """What one operation holds at once: its operands and results, as placed by the strategy."""
    if node.is_placeholder or node.op in VIEWS or node.op == REST:
        return 0
    taken = sum(local_bytes(t, p, prices.mesh) for t, p in zip(inputs, strategy.inputs, strict=True))
    made = zip(node.types, strategy.outputs, strict=True)
    return taken + sum(local_bytes(t, p, prices.mesh) for t, p in made if t is not None)


def account(
    graph: Graph,
    assignment: Assignment,
    prices: Prices,
    optimizer: str,
    repeats: Repeats = ONCE,
    loans: Loans = NO_LOANS,
    agreement: float | None = None,
    windows: Sequence[Beside] | None = None,
    section_of: Callable[[Priced], str] = lambda line: line.phase,
) -> Account:
    """The bill of ``assignment`` for a step that runs ``graph`` as ``repeats`` says. ``agreement``: seconds of agreeing
    on overflow that this bill has; None for those of a step that is ``graph`` alone. ``windows``, if not those of such
    a step, are of the sections that ``section_of`` gives."""
    agreeing = agreement_seconds(prices, (graph,)) if agreement is None else agreement
    lines = (
        *_compute_lines(graph, assignment, prices, repeats),
        *_use_lines(graph, assignment, prices, repeats.microbatches),
        *_optimizer_lines(graph, assignment, prices, optimizer, loans),
        *([Line("optimizer", "loss scale", "", "backward", agreeing)] if agreeing else []),
        *_loan_lines(graph, loans),
    )
    if windows is None:
        windows = windows_of(graph, prices.cluster, repeats)
    hidden = _hidden_lines(lines, windows, section_of)
    return Account((*lines, *hidden), memory(graph, assignment, prices, optimizer, repeats, loans))


def _hidden_lines(
    lines: Sequence[Line], windows: Iterable[Beside], section_of: Callable[[Priced], str]
) -> Iterator[Line]:
    sides = sides_of_sections(lines, section_of)
    reductions = sum(line.seconds for line in lines if line.kind == "gradient")
    for window in windows:
        seconds = window.seconds(sides, reductions)
        if seconds > 0:
            yield Line("hidden", window.name, "", window.phase, -seconds)


def adding_seconds(
    prices: Prices, node: Node, strategy: Strategy, made: Container[Value | None], repeats: Repeats
) -> float:
    """What it takes in a step to add up the gradients that ``node`` makes (those of its results that are in ``made``)
    over microbatches: each after the first is read with the sum so far, which is written. A product adds by itself: it
    reads the sum and writes that instead of its result."""
    places = enumerate(zip(node.types, strategy.outputs, strict=True))
    raw = sum(local_bytes(t, p, prices.mesh) for i, (t, p) in places if t and Value(node.name, i) in made)
    passes = 1.0 if node.op == "aten.mm.default" else 3.0
    return passes * raw * (repeats.microbatches - 1) / prices.cluster.device.memory_bandwidth


def _compute_lines(graph: Graph, assignment: Assignment, prices: Prices, repeats: Repeats) -> Iterator[Line]:
    made = {output.value for output in graph.outputs if output.kind == "gradient"}
    for node in graph.nodes:
        if not node.is_placeholder and node.op != REST:
            inputs = tuple(graph.type_of(value) for value in node.operands)
            strategy, times = assignment.strategies[node.name], repeats.microbatches
            seconds = prices.node(node, inputs, strategy) * times + adding_seconds(
                prices, node, strategy, made, repeats
            )
            yield Line("compute", node.name, node.module, node.phase, seconds, (), times)


def _use_lines(graph: Graph, assignment: Assignment, prices: Prices, times: int) -> Iterator[Line]:
    for use in uses(graph, assignment):
        if use.source == use.target:
            continue
        bucketed = use.role in ("gradient", "refresh")
        table = prices.table(use.kind, bucketed=bucketed)
        unseen = use.role == "output" and travels_unseen(graph, use.value)
        direct = make_hop(use.kind, use.source, use.target, prices.mesh) if unseen else None
        hops = (direct,) if direct is not None else table.path(use.source, use.target)
        kind: LineKind = "reshard"
        if bucketed:
            kind = use.role  # type: ignore[assignment]
        elif use.value.node in assignment.parameters:
            kind = "weight"
        module = graph[use.value.node].module or graph[use.consumer].module if use.consumer in graph else ""
        seconds = 0.0 if unseen else table.cost(use.source, use.target)
        often = 1 if bucketed else times
        yield Line(kind, use.value.node, module, use.phase, seconds * often, hops, often)


def _loan_lines(graph: Graph, loans: Loans) -> Iterator[Line]:
    for path, loan in loans.items():
        if loan.seconds:
            yield Line("refresh", graph.parameters[path].name, path.rpartition(".")[0], "forward", loan.seconds)


def _optimizer_lines(
    graph: Graph, assignment: Assignment, prices: Prices, optimizer: str, loans: Loans
) -> Iterator[Line]:
    updated = set(trained(graph)) - set(loans)
    for node in graph.placeholders("param"):
        place = assignment.parameters[node.name]
        seconds = casting_seconds(prices, node, place)
        if node.target in updated:
            seconds += optimizer_seconds(prices, node, place, optimizer)
        if node.target in updated or seconds:
            yield Line("optimizer", node.name, node.target.rpartition(".")[0], "backward", seconds)
        moving = offload_seconds(prices, node, place, optimizer) if node.target in updated else 0.0
        if moving:
            yield Line("offload", node.name, node.target.rpartition(".")[0], "backward", moving)


def trained(graph: Graph) -> tuple[str, ...]:
    """Paths of the parameters that get a gradient."""
    return tuple(output.name for output in graph.outputs if output.kind == "gradient" and output.value is not None)


def accumulator_bytes(prices: Prices, kind: TensorType, raw: Placements, repeats: Repeats) -> int:
    """Bytes in which a gradient made as a partial sum is added up over microbatches, beside the reduced gradient; one
    that is not is added up where it rests."""
    if not repeats.accumulates or not any(isinstance(place, Partial) for place in raw):
        return 0
    return local_bytes(kind, raw, prices.mesh)


def memory(
    graph: Graph,
    assignment: Assignment,
    prices: Prices,
    optimizer: str,
    repeats: Repeats = ONCE,
    loans: Loans = NO_LOANS,
) -> Memory:
    """Peak bytes by part: everything that rests on the device through the step, and the largest operation's operands
    and results beside what backward has recomputed and needs still."""
    host = host_memory(graph, assignment, prices, optimizer, loans)
    weights = gradients = states = activations = inputs = 0
    temporary = host.largest
    made = {o.name: o.value for o in graph.outputs if o.kind == "gradient" and o.value is not None}
    for node in graph.nodes:
        if node.op == "param":
            place = assignment.parameters[node.name]
            parts = held_bytes(prices, node, place, optimizer, loans)
            weights += parts[0]
            if node.target in made:
                raw = assignment.placements_of(made[node.target])
                gradients += parts[1] + accumulator_bytes(prices, node.stored, raw, repeats)
                states += parts[2]
        elif node.op == REST and node.name not in graph.kept:
            continue
        elif node.op in (REST, "receive"):
            held = local_bytes(node.type, assignment.strategies[node.name].outputs[0], prices.mesh)
            activations += held * repeats.in_flight
        elif node.is_placeholder:
            inputs += local_bytes(node.type, assignment.strategies[node.name].outputs[0], prices.mesh)
        else:
            kinds = tuple(graph.type_of(value) for value in node.operands)
            temporary = max(temporary, temporary_bytes(prices, node, kinds, assignment.strategies[node.name]))
    temporary += recomputed_bytes(graph, assignment)
    return Memory(weights, gradients, states, activations, temporary, inputs, host.bytes)


def recomputed_bytes(graph: Graph, assignment: Assignment) -> int:
    """The most bytes of recomputed values that backward holds at once, each from when its rest is made to its last
    use."""
    last = {v.node: i for i, n in enumerate(graph.nodes) for v in n.operands}
    held = most = 0
    leaving: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        if node.op == REST and node.phase == "backward":
            size = local_bytes(node.type, assignment.strategies[node.name].outputs[0], assignment.mesh)
            held += size
            end = last.get(node.name, position)
            leaving[end] = leaving.get(end, 0) + size
        most = max(most, held)
        held -= leaving.pop(position, 0)
    return most
