"""Which classes hand values to which: what becomes the transfers of a placement program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from autopar.ir.node import Output, Value

from .choices import OUTPUTS, ChoiceSets


class TensorEdge(NamedTuple):
    """What transfers of folded layers have in common: result ``result`` of class ``producer`` goes, in one phase or for
    one purpose (``role``), to operands of ``consumers``."""

    producer: str
    result: int
    role: str
    consumers: tuple[tuple[str, int], ...]


def find_edges(choice_sets: ChoiceSets) -> Counter[TensorEdge]:
    """The routes of a graph in order, and how often there is each."""
    found = Counter[TensorEdge]()
    for node in choice_sets.graph.nodes:
        for index, kind in enumerate(node.types):
            if kind is not None:
                found.update(_edges(choice_sets, Value(node.name, index)))
    for output in choice_sets.graph.outputs:
        if output.value is not None and output.kind in ("gradient", "input_gradient"):
            found[_gradient_edge(choice_sets, output, output.value)] += choice_sets.often(output.value.node)
    return found


def _edges(choice_sets: ChoiceSets, value: Value) -> Mapping[TensorEdge, int]:
    """How often there is a route, one for each phase the value is used in. To be a result of the model is a use; what
    may run again may use it in backward."""
    by_phase: dict[str, dict[tuple[str, int], None]] = {}
    often = Counter[str]()
    for user, operand in choice_sets.graph.users.get(value, ()):
        name = choice_sets.class_of(user.name)
        often[user.phase] = max(often[user.phase], choice_sets.often(user.name))
        by_phase.setdefault(user.phase, {})[name, operand] = None
        if user.phase == "forward" and choice_sets.may_run_again(name):
            by_phase.setdefault("backward", {})[name, operand] = None
    if value in choice_sets.results:
        by_phase.setdefault(choice_sets.graph[value.node].phase, {})[OUTPUTS, 0] = None
    producer = choice_sets.class_of(value.node)
    return {TensorEdge(producer, value.index, p, tuple(found)): max(1, often[p]) for p, found in by_phase.items()}


def _gradient_edge(choice_sets: ChoiceSets, output: Output, value: Value) -> TensorEdge:
    """To the parameter whose gradient ``value`` is, or out of the model for that of an input."""
    producer, consumer = choice_sets.class_of(value.node), (OUTPUTS, 0)
    if output.kind == "gradient":
        consumer = choice_sets.class_of(choice_sets.graph.parameters[output.name].name), -1
    return TensorEdge(producer, value.index, "gradient", (consumer,))
