"""The tensor edges between classes, which become the transfers of a placement program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    edges = Counter[TensorEdge]()
    for value in _used(choice_sets):
        for edge, count in _edges(choice_sets, value).items():
            edges[edge] += count
    for output, value in _gradients(choice_sets):
        edges[_gradient_edge(choice_sets, output, value)] += choice_sets.count_of(value.node)
    return edges


def _edges(choice_sets: ChoiceSets, value: Value) -> Mapping[TensorEdge, int]:
    """The edges of a value, one for each phase in which it is used, and how often each occurs."""
    counts: dict[str, int] = {}
    if choice_sets.multiplicity:
        for user, _ in choice_sets.graph.users.get(value, ()):
            counts[user.phase] = max(counts.get(user.phase, 1), choice_sets.count_of(user.name))
    producer = choice_sets.class_of(value.node)
    return {
        TensorEdge(producer, value.index, phase, tuple(consumers)): counts.get(phase, 1)
        for phase, consumers in _readers(choice_sets, value).items()
    }


def _readers(choice_sets: ChoiceSets, value: Value) -> Mapping[str, Mapping[tuple[str, int], Sequence[str]]]:
    """For each phase in which a value is used, the classes and operands that read it, with their nodes. Being a result
    of the model is a use; a node that may be recomputed may use the value in backward."""
    found: dict[str, dict[tuple[str, int], list[str]]] = {}
    for user, operand in choice_sets.graph.users.get(value, ()):
        name, phase = choice_sets.class_of(user.name), user.phase
        found.setdefault(phase, {}).setdefault((name, operand), []).append(user.name)
        if phase == "forward" and choice_sets.may_run_again(name):
            found.setdefault("backward", {}).setdefault((name, operand), []).append(user.name)
    if value in choice_sets.results:
        found.setdefault(choice_sets.graph[value.node].phase, {})[OUTPUTS, 0] = [OUTPUTS]
    for cache in choice_sets.graph.new_caches.get(value, ()):
        found.setdefault("forward", {}).setdefault((choice_sets.class_of(cache), -1), []).append(cache)
    return found


class EdgeCopy(NamedTuple):
    """A tensor edge where it occurs: the node that produces the value and, of each consumer, the nodes that read it."""

    edge: TensorEdge
    producer: str
    consumers: tuple[Sequence[str], ...]


def edge_copies(choice_sets: ChoiceSets) -> Iterator[EdgeCopy]:
    """What :func:`find_edges` counts, without multiplicities."""
    graph = choice_sets.graph
    for value in _used(choice_sets):
        producer = choice_sets.class_of(value.node)
        for phase, readers in _readers(choice_sets, value).items():
            yield EdgeCopy(
                TensorEdge(producer, value.index, phase, tuple(readers)), value.node, tuple(readers.values())
            )
    for output, value in _gradients(choice_sets):
        edge = _gradient_edge(choice_sets, output, value)
        reader = graph.parameters[output.name].name if output.kind == "gradient" else OUTPUTS
        yield EdgeCopy(edge, value.node, ((reader,),))


def _used(choice_sets: ChoiceSets) -> Iterator[Value]:
    """The values that nodes read, or that are results."""
    graph, returned = choice_sets.graph, choice_sets.results
    for node in graph.nodes:
        for index, kind in enumerate(node.types):
            value = Value(node.name, index)
            if kind is not None and (value in graph.users or value in returned or value in graph.new_caches):
                yield value


def _gradients(choice_sets: ChoiceSets) -> Iterator[tuple[Output, Value]]:
    for output in choice_sets.graph.outputs:
        if output.value is not None and output.kind in ("gradient", "input_gradient"):
            yield output, output.value


def _gradient_edge(choice_sets: ChoiceSets, output: Output, value: Value) -> TensorEdge:
    """The edge from ``value`` to the parameter whose gradient it is, or to the outputs if it is the gradient of an
    input."""
    producer, consumer = choice_sets.class_of(value.node), (OUTPUTS, 0)
    if output.kind == "gradient":
        consumer = choice_sets.class_of(choice_sets.graph.parameters[output.name].name), -1
    return TensorEdge(producer, value.index, "gradient", (consumer,))
