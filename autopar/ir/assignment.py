"""A complete choice of placements for a graph: what the solver decides and lowering carries out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .graph import Graph
from .node import Node, Output, Phase, TensorType, Value
from .placements import REPLICATE, Placements, Strategy


@dataclass(frozen=True)
class Recomputed(Strategy):
    """A strategy of a forward operation that runs once more in backward; for a rest: its value is not kept."""

    @property
    def plain(self) -> Strategy:
        return Strategy(self.inputs, self.outputs, self.local)

    def __str__(self) -> str:
        return f"{self.plain}, recomputed"


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """The three resting places of a parameter.

    ``weight``: how its value lies while a step runs; a use that needs more gathers it each time. ``gradient``: what its
    gradient is reduced to. ``optimizer``: how its optimizer state lies, and the DTensor that the user sees and the
    optimizer updates; if it shards more than ``weight``, the updated value is gathered once a step (ZeRO-1 and 2).
    ``offload``: whether the optimizer state lies so in host memory, and on the device only while it is updated.
    """

    weight: Placements
    gradient: Placements
    optimizer: Placements
    offload: bool = False


@dataclass(frozen=True)
class Assignment:
    """``strategies[node]`` for every operation, input and buffer; ``parameters[node]`` for every parameter; by node
    name. ``sends[name]``: the placements in which the value ``name`` leaves for other pipeline stages. ``recomputed``:
    the forward nodes that backward runs again (:func:`autopar.passes.recompute.recompute.recomputed` carries it
    out)."""

    mesh: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, ParameterPlacement]
    sends: Mapping[str, tuple[Placements, ...]] = field(default_factory=dict)
    recomputed: frozenset[str] = frozenset()

    def placements_of(self, value: Value) -> Placements:
        """How the result ``value`` lies when its node has run."""
        if value.node in self.parameters:
            return self.parameters[value.node].weight
        return self.strategies[value.node].outputs[value.index]

    @property
    def replicated(self) -> Placements:
        return (REPLICATE,) * len(self.mesh)


@dataclass(frozen=True, slots=True)
class Use:
    """``value`` is needed as ``target``: paid once per value, phase and target, however many nodes need it so. ``role``
    tells what for: ``operand`` of nodes, ``gradient`` of a parameter, model ``output`` or ``refresh`` of a working
    weight."""

    value: Value
    kind: TensorType
    phase: Phase
    role: str
    source: Placements
    target: Placements
    consumer: str


def uses(graph: Graph, assignment: Assignment) -> Iterator[Use]:
    """Every reshard the assignment implies, those that change nothing included, in order of need."""
    seen: set[tuple[Value, Phase, Placements]] = set()
    for node in graph.nodes:
        for use in operand_uses(graph, assignment, node):
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
    """The operands of ``node`` in order, each as the node takes it."""
    for index, value in enumerate(node.operands):
        source, target = assignment.placements_of(value), assignment.strategies[node.name].inputs[index]
        yield Use(value, graph.type_of(value), node.phase, "operand", source, target, node.name)


def travels_unseen(graph: Graph, value: Value) -> bool:
    """Whether resharding ``value`` costs a step no time: a scalar result, such as the loss, that nothing else uses and
    that is on its way while backward runs. It goes by one hop if it can: the second of two would wait for the first."""
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
        yield Use(value, kind, phase, role, source, assignment.replicated, output.name)
