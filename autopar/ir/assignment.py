"""A complete choice of placements for a graph: what the solver decides and lowering carries out."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from autopar.offload import Tier

from .graph import Graph
from .node import Node, Output, Phase, TensorType, Value
from .placements import REPLICATE, Placements, Strategy


@dataclass(frozen=True)
class Recomputed(Strategy):
    """A strategy of a forward operation that runs once more in backward; a saved activation with it is not kept."""

    @property
    def plain(self) -> Strategy:
        return Strategy(self.inputs, self.outputs, self.local)

    def __str__(self) -> str:
        return f"{self.plain}, recomputed"


@dataclass(frozen=True)
class Offloaded(Strategy):
    """The strategy of a saved activation that rests in host memory from forward to backward."""

    @property
    def plain(self) -> Strategy:
        return Strategy(self.inputs, self.outputs, self.local)

    def __str__(self) -> str:
        return f"{self.plain}, in host memory until backward"


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """The placements of a parameter, its gradient and its optimizer state.

    ``weight``: the placements of its value while a step runs; a use that needs more gathers it each time. ``gradient``:
    what its gradient is reduced to. ``optimizer``: the placements of its optimizer state and of the DTensor that the
    user sees and the optimizer updates; if they shard more than ``weight``, the updated value is gathered once a step
    (ZeRO-1 and 2). ``offload``: the memory in which the optimizer state is kept, while it is on the device only for its
    update; "": the device's.
    """

    weight: Placements
    gradient: Placements
    optimizer: Placements
    offload: Tier | Literal[""] = ""


@dataclass(frozen=True, slots=True)
class WeightInHost(ParameterPlacement):
    """The placements of a parameter whose stored weight rests in host memory and visits the device for each use."""

    @property
    def plain(self) -> ParameterPlacement:
        return ParameterPlacement(self.weight, self.gradient, self.optimizer, self.offload)


@dataclass(frozen=True)
class Assignment:
    """``strategies[node]`` for every operation, input and buffer; ``parameters[node]`` for every parameter; by node
    name. ``sends[name]``: the placements in which the value ``name`` is sent to other pipeline stages. ``recomputed``:
    the forward nodes that backward runs again (:func:`autopar.passes.recompute.recompute.recomputed` carries it
    out). ``offloaded``: the saved activations and the parameters that rest in host memory
    (:mod:`autopar.passes.lower.lower` carries it out)."""

    mesh: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, ParameterPlacement]
    sends: Mapping[str, tuple[Placements, ...]] = field(default_factory=dict)
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    def placements_of(self, value: Value) -> Placements:
        """The placements of the result ``value`` after its node has run."""
        if value.node in self.parameters:
            return self.parameters[value.node].weight
        return self.strategies[value.node].outputs[value.index]

    def place_of_result(self, graph: Graph, output: Output) -> Placements:
        """The placements in which a step leaves a result of the model: those of a cache where they were, and whatever
        it returns, or writes to its buffers, whole on every device."""
        cache = graph.caches.get(output.name) if output.kind == "mutation" else None
        return self.replicated if cache is None else self.strategies[cache.name].outputs[0]

    def resting(self, graph: Graph) -> dict[str, Placements]:
        """Where the caches of ``graph`` rest, by name."""
        return {name: self.strategies[node.name].outputs[0] for name, node in graph.caches.items()}

    @property
    def replicated(self) -> Placements:
        return (REPLICATE,) * len(self.mesh)


class Use(NamedTuple):
    """``value`` is needed with placements ``target``: priced once per value, phase and target, however many nodes need
    it. ``role`` says what it is needed for: ``operand`` of nodes, ``gradient`` of a parameter, model ``output`` or
    ``refresh`` of a working weight."""

    value: Value
    kind: TensorType
    phase: Phase
    role: str
    source: Placements
    target: Placements
    consumer: str


def uses(graph: Graph, assignment: Assignment) -> Iterator[Use]:
    """Yields every reshard that the assignment implies in order of use, including those that change nothing."""
    operands = (use for node in graph.nodes for use in operand_uses(graph, assignment, node))
    return _each_once(graph, assignment, operands)


def moves(graph: Graph, assignment: Assignment) -> tuple[list[Use], list[Use]]:
    """Those of :func:`uses` that change something, and those of operands among them once for every consumer."""
    operands = list(moved_operands(graph, assignment))
    every = _each_once(graph, assignment, operands)
    return [use for use in every if use.source != use.target], operands


def _each_once(graph: Graph, assignment: Assignment, operands: Iterable[Use]) -> Iterator[Use]:
    seen: set[tuple[Value, Phase, Placements]] = set()
    for use in operands:
        if (use.value, use.phase, use.target) not in seen:
            seen.add((use.value, use.phase, use.target))
            yield use
    for output in graph.outputs:
        for use in _output_uses(graph, assignment, output):
            if use.role == "gradient":
                yield use
            elif (use.value, use.phase, use.target) not in seen:
                seen.add((use.value, use.phase, use.target))
                yield use
    for node in graph.placeholders("param"):
        place = assignment.parameters[node.name]
        if place.optimizer != place.weight:
            value = Value(node.name)
            yield Use(value, node.type, "forward", "refresh", place.optimizer, place.weight, node.name)


def operand_uses(graph: Graph, assignment: Assignment, node: Node) -> Iterator[Use]:
    """Yields the operands of ``node`` in order, each with the placements that the node takes it in."""
    for index, value in enumerate(node.operands):
        source, target = assignment.placements_of(value), assignment.strategies[node.name].inputs[index]
        yield Use(value, graph.type_of(value), node.phase, "operand", source, target, node.name)


def moved_operands(
    graph: Graph, assignment: Assignment, of: Container[str] | None = None, nodes: Iterable[Node] | None = None
) -> Iterator[Use]:
    """Yields the :func:`operand_uses` of all nodes that change something: few of those of a large graph. ``of``: the
    nodes whose results are asked for; None: all. ``nodes``: those that read any of these, if they are known."""
    strategies, parameters = assignment.strategies, assignment.parameters
    for node in graph.nodes if nodes is None else nodes:
        operands = node.operands
        if not operands:
            continue
        inputs = strategies[node.name].inputs
        for value, target in zip(operands, inputs, strict=True):
            if of is not None and value.node not in of:
                continue
            place = parameters.get(value.node)
            source = strategies[value.node].outputs[value.index] if place is None else place.weight
            if source is not target and source != target:
                yield Use(value, graph.type_of(value), node.phase, "operand", source, target, node.name)


def overlaps_backward(graph: Graph, value: Value) -> bool:
    """Whether resharding ``value`` costs a step no time: a scalar result, such as the loss, that nothing else uses, so
    that its reshard overlaps backward. It takes one hop if it can: the second of two would wait for the first."""
    return bool(graph.gradients) and value not in graph.users and graph.type_of(value).numel == 1


def _output_uses(graph: Graph, assignment: Assignment, output: Output) -> Iterator[Use]:
    if output.value is None:
        return
    value, source = output.value, assignment.placements_of(output.value)
    kind, phase = graph.type_of(value), graph[value.node].phase
    if output.kind == "send":
        for target in assignment.sends[output.name]:
            yield Use(value, kind, phase, "output", source, target, output.name)
    elif output.kind == "gradient":
        consumer = graph.parameters[output.name].name
        yield Use(value, kind, phase, "gradient", source, assignment.parameters[consumer].gradient, consumer)
    else:
        role = "gradient" if output.kind == "input_gradient" else "output"
        yield Use(value, kind, phase, role, source, assignment.place_of_result(graph, output), output.name)
