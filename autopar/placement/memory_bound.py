"""The memory of a placed step, as the placement program counts it: an upper bound of what the step needs.

:mod:`autopar.planner.steps.exact_memory` measures the need to the byte, by rehearsing the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.ir.assignment import moved_operands
from autopar.ir.graph import Graph
from autopar.ir.node import PLACEHOLDERS, SAVED_ACTIVATION, Node, Value
from autopar.offload import NVME_BUFFERS

from .item_prices import (
    accumulator_bytes,
    offloaded_bytes,
    parameter_bytes,
    piece_bytes,
    temporary_bytes,
    weight_bytes,
)
from .placed_step import PlacedStep, trained
from .prices import local_bytes

# Messages of weights that are in memory at once: that in use, the next, and the buffer of one of them.
MESSAGES_HELD = 3
# The part of a full message up to which a rest joins it (:mod:`autopar.passes.lower.weight_gathers`).
LARGEST_REST = 0.25


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes on the device that holds most, by part. ``host``, ``nvme``: bytes in host memory and on a
    local disk, which are not part of the peak."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    inputs: int
    host: int = 0
    nvme: int = 0

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary + self.inputs


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes outside of the device's memory: ``bytes`` in the host's, ``nvme`` on a local disk. ``visiting``: the most
    bytes of optimizer state that are on the device for updates: those of the largest parameter, or several as small."""

    bytes: int = 0
    visiting: int = 0
    nvme: int = 0


def memory(step: PlacedStep) -> Memory:
    """Peak bytes by part: everything that rests on the device throughout the step, the operands and results of the
    largest operation, and the recomputed values that backward holds."""
    graph, assignment, prices = step.graph, step.assignment, step.prices
    host = host_memory(step)
    weights, gradients, states = map(sum, zip((0, 0, 0), *_held_parameters(step), strict=True))
    activations, inputs = saved_bytes(step) * step.repeats.in_flight, 0
    for node in _inputs(graph):
        part = prices.held(node.type, assignment.strategies[node.name].outputs[0])
        inputs += part * step.repeats.copies_of(node.op) * step.count_of(node.name)
    temporary, strategies = host.visiting, assignment.strategies
    # The first of each class that chooses alike: others take as much.
    distinct = {(own, id(strategies[name])): name for name, own in _computed(graph)}
    for name in distinct.values():
        node = graph[name]
        kinds = tuple([graph.type_of(value) for value in node.operands])
        temporary = max(temporary, temporary_bytes(prices, node, kinds, strategies[name]))
    temporary += recomputed_bytes(step) + fetched_bytes(step) + message_bytes(step)
    return Memory(weights, gradients, states, activations, temporary, inputs, host.bytes, host.nvme)


def _inputs(graph: Graph) -> list[Node]:
    """What a step is given, besides parameters and values of other stages."""
    kinds = (kind for kind in PLACEHOLDERS if kind not in ("param", "receive"))
    return [node for kind in kinds for node in graph.placeholders(kind)]


def _computed(graph: Graph) -> list[tuple[str, str]]:
    """The names of the nodes that compute something, the last first, each with that of its class."""

    def find() -> list[tuple[str, str]]:
        nodes = (node for node in reversed(graph.nodes) if not node.is_placeholder and node.op != SAVED_ACTIVATION)
        return [(node.name, graph.classes.get(node.name, node.name)) for node in nodes]

    return graph.once(_computed, find)


def saved_bytes(step: PlacedStep) -> int:
    """Bytes on the device of what one microbatch in flight holds until its backward: saved activations, and values
    received."""
    kept = (step.graph[name] for name in step.graph.kept if name not in step.assignment.offloaded)
    return sum(
        step.prices.held(node.type, step.assignment.strategies[node.name].outputs[0]) * step.count_of(node.name)
        for node in (*step.graph.placeholders("receive"), *kept)
    )


def rests_on_device(step: PlacedStep, node: Node) -> bool:
    """Whether ``node`` is a saved activation that the device keeps until backward."""
    return node.name in step.graph.kept and node.name not in step.assignment.offloaded


def offloaded_activation_bytes(step: PlacedStep) -> int:
    """Bytes of the activations in host memory of all microbatches in flight."""
    return step.repeats.in_flight * sum(
        local_bytes(step.graph[name].type, step.assignment.strategies[name].outputs[0], step.prices.mesh)
        for name in step.assignment.offloaded & step.graph.kept
    )


def offloaded_weight_bytes(step: PlacedStep) -> int:
    """Bytes of the weights in host memory. One that another chunk on the same devices stores counts there."""
    shared, assignment = step.shared_parameters, step.assignment
    nodes = [node for node in step.graph.placeholders("param") if node.name in assignment.offloaded]
    return sum(
        weight_bytes(step.prices, node, assignment.parameters[node.name])
        for node in nodes
        if node.target not in shared or shared[node.target].is_remote
    )


def _held_parameters(step: PlacedStep) -> Iterator[tuple[int, int, int]]:
    """Bytes of (weights, gradients, optimizer state) of each parameter."""
    for node in step.graph.placeholders("param"):
        weight, gradient, state = held_bytes(step, node)
        count = step.count_of(node.name)
        yield weight * count, gradient * count, state * count


def host_memory(step: PlacedStep) -> HostMemory:
    """What the step keeps outside of the memory of each device."""
    nodes = [step.graph.parameters[path] for path in trained(step.graph) if path not in step.shared_parameters]
    places = {node.name: step.assignment.parameters[node.name] for node in nodes}
    counts = {node.name: offloaded_bytes(step.prices, node, places[node.name], step.optimizer) for node in nodes}
    in_host, on_disk = ([n for name, n in counts.items() if places[name].offload == t] for t in ("host", "nvme"))
    away = (node for node in nodes if places[node.name].offload == "nvme")
    piece = max((piece_bytes(step.prices, node, places[node.name], step.optimizer) for node in away), default=0)
    buffers, has_host = NVME_BUFFERS * piece, step.prices.cluster.device.has_host
    return HostMemory(
        bytes=sum(in_host)
        + offloaded_activation_bytes(step)
        + offloaded_weight_bytes(step)
        + (buffers if has_host else 0),
        visiting=max(*in_host, piece if has_host else buffers, 0),
        nvme=sum(on_disk),
    )


def held_bytes(step: PlacedStep, node: Node) -> tuple[int, int, int]:
    """Bytes on a device of (weights, gradients, optimizer state) of the parameter ``node``, including gradient
    accumulators. For a borrowed parameter, bytes that count for its owner are left out: the optimizer state and, if the
    owner is on the same devices, the stored tensor. A parameter that is not trained has only weights."""
    place, mesh = step.assignment.parameters[node.name], step.prices.mesh
    weight, gradient, state = parameter_bytes(step.prices, node, place, step.optimizer)
    weight = 0 if node.name in step.assignment.offloaded else weight
    shared, gradient_value = step.shared_parameters.get(node.target), step.graph.gradients.get(node.target)
    if shared is not None:
        is_apart = shared.is_remote or node.name in step.assignment.offloaded
        weight -= 0 if is_apart else local_bytes(node.stored, place.optimizer, mesh)
        state = 0
    if gradient_value is None:
        return weight, 0, 0
    raw = step.assignment.placements_of(gradient_value)
    return weight, gradient + accumulator_bytes(step.prices, node.stored, raw, step.repeats), state


def fetched_bytes(step: PlacedStep) -> int:
    """The most bytes of activations and weights from host memory that a phase holds at once. Each is read ahead when
    the one before is first used, and held to its last use."""
    return max(_fetched_bytes(step, phase) for phase in ("forward", "backward"))


def _fetched_bytes(step: PlacedStep, phase: str) -> int:
    graph, assignment = step.graph, step.assignment
    away = {n for n in assignment.offloaded if phase == "backward" or n in assignment.parameters}
    if not away:
        return 0
    uses: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for value in node.operands if node.phase == phase else ():
            if value.node in away:
                uses.setdefault(value.node, []).append(position)
    events: list[tuple[int, int]] = []
    begin = 0
    for name, positions in uses.items():
        size = step.prices.held(graph[name].type, assignment.placements_of(Value(name)))
        events += [(begin, size), (positions[-1] + 1, -size)]
        begin = positions[0]
    held = most = 0
    for _, size in sorted(events):
        held += size
        most = max(most, held)
    return most


def message_bytes(step: PlacedStep) -> int:
    """The most bytes that messages of small weights hold beyond what an operation that reads them counts: the members
    of the one in use, those of the next, which is read ahead, and the buffer that these are copied out of. A message is
    closed behind the weight that fills it, and a small rest joins it (:mod:`autopar.ir.weight_messages`)."""
    messages, sent = step.prices.messages, defaultdict[str, dict[Value, int]](dict)
    readers = step.graph.once("readers of parameters", lambda: _readers_of_parameters(step.graph))
    for use in moved_operands(step.graph, step.assignment, step.assignment.parameters, readers):
        if messages.takes(use.kind):
            held = step.prices.held(use.kind, use.target)
            if held > step.prices.held(use.kind, use.source):
                sent[use.phase][use.value] = held
    most = 0
    for gathered in sent.values():
        counts = [step.count_of(value.node) for value in gathered]
        total = sum(held * count for held, count in zip(gathered.values(), counts, strict=True))
        largest = messages.limit * (1.0 + LARGEST_REST) + max(gathered.values())
        if sum(counts) > 1:  # A single one travels alone. All of them, and their copies, are the most there is.
            most = max(most, int(min(MESSAGES_HELD * largest, 2 * total)))
    return most


def _readers_of_parameters(graph: Graph) -> tuple[Node, ...]:
    return tuple(node for node in graph.nodes if any(graph[value.node].op == "param" for value in node.operands))


def recomputed_bytes(step: PlacedStep) -> int:
    """The most bytes of recomputed values that backward holds at once. Each is held from its recomputation to its last
    use."""
    return max(_recomputed(step, lambda _: 0).values(), default=0)


def recomputed_of(step: PlacedStep, part: Callable[[Node], int]) -> dict[int, int]:
    """:func:`recomputed_bytes` of the values of each part of the graph alone. ``part``: that of the node of a value."""
    return _recomputed(step, part)


def _recomputed(step: PlacedStep, part: Callable[[Node], int]) -> dict[int, int]:
    graph, assignment = step.graph, step.assignment
    again = {n.name for n in graph.nodes if n.op == SAVED_ACTIVATION and n.phase == "backward"}
    if not again:
        return {}
    last = {v.node: i for i, n in enumerate(graph.nodes) for v in n.operands if v.node in again}
    held: defaultdict[int, int] = defaultdict(int)
    most: defaultdict[int, int] = defaultdict(int)
    leaving: dict[int, list[tuple[int, int]]] = {}
    for position, node in enumerate(graph.nodes):
        if node.name in again:
            own, place = part(node), assignment.strategies[node.name].outputs[0]
            size = step.prices.held(node.type, place)
            held[own] += size
            most[own] = max(most[own], held[own])
            leaving.setdefault(last.get(node.name, position), []).append((own, size))
        for own, size in leaving.pop(position, ()):
            held[own] -= size
    return dict(most)
