"""The tensor edges between classes, which become the transfers of a placement program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from autopar.ir.node import Output, Value

from .choices import OUTPUTS, ChoiceSets


class TensorEdge(NamedTuple):
    """An edge that equal transfers of folded layers share: result ``result`` of class ``producer`` is read, in one
    phase or for one purpose (``role``), by operands of ``consumers``."""

    producer: str
    result: int
    role: str
    consumers: tuple[tuple[str, int], ...]


def find_edges(choice_sets: ChoiceSets) -> Counter[TensorEdge]:
    """The edges of a graph in order, and how often each occurs."""
    if choice_sets.recomputable is None and not choice_sets.multiplicity:
        return choice_sets.graph.once(find_edges, lambda: _find_edges(choice_sets))
    return _find_edges(choice_sets)


def _find_edges(choice_sets: ChoiceSets) -> Counter[TensorEdge]:
    edges, graph, returned = Counter[TensorEdge](), choice_sets.graph, choice_sets.results
    for node in graph.nodes:
        for index, kind in enumerate(node.types):
            value = Value(node.name, index)
            if kind is not None and (value in graph.users or value in returned or value in graph.new_caches):
                for edge, count in _edges(choice_sets, value).items():
                    edges[edge] += count
    for output in graph.outputs:
        if output.value is not None and output.kind in ("gradient", "input_gradient"):
            edges[_gradient_edge(choice_sets, output, output.value)] += choice_sets.count_of(output.value.node)
    return edges


def _edges(choice_sets: ChoiceSets, value: Value) -> Mapping[TensorEdge, int]:
    """The edges of a value, one for each phase in which it is used, and how often each occurs. Being a result of the
    model is a use; a node that may be recomputed may use the value in backward."""
    by_phase: dict[str, dict[tuple[str, int], None]] = {}
    counts: dict[str, int] = {}
    for user, operand in choice_sets.graph.users.get(value, ()):
        name, phase = choice_sets.class_of(user.name), user.phase
        counts[phase] = max(counts.get(phase, 1), choice_sets.count_of(user.name))
        by_phase.setdefault(phase, {})[name, operand] = None
        if phase == "forward" and choice_sets.may_run_again(name):
            by_phase.setdefault("backward", {})[name, operand] = None
    if value in choice_sets.results:
        by_phase.setdefault(choice_sets.graph[value.node].phase, {})[OUTPUTS, 0] = None
    for cache in choice_sets.graph.new_caches.get(value, ()):
        by_phase.setdefault("forward", {})[choice_sets.class_of(cache), -1] = None
    producer = choice_sets.class_of(value.node)
    return {
        TensorEdge(producer, value.index, phase, tuple(consumers)): counts.get(phase, 1)
        for phase, consumers in by_phase.items()
    }


def _gradient_edge(choice_sets: ChoiceSets, output: Output, value: Value) -> TensorEdge:
    """The edge from ``value`` to the parameter whose gradient it is, or to the outputs if it is the gradient of an
    input."""
    producer, consumer = choice_sets.class_of(value.node), (OUTPUTS, 0)
    if output.kind == "gradient":
        consumer = choice_sets.class_of(choice_sets.graph.parameters[output.name].name), -1
    return TensorEdge(producer, value.index, "gradient", (consumer,))
