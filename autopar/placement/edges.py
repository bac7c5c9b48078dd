"""Which classes hand values to which: what becomes the transfers of a placement program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from autopar.ir.node import Output, Value

from .choices import OUTPUTS, Offer


class Route(NamedTuple):
    """What transfers of folded layers have in common: result ``result`` of class ``producer`` goes, in one phase or for
    one purpose (``role``), to operands of ``consumers``."""

    producer: str
    result: int
    role: str
    consumers: tuple[tuple[str, int], ...]


def find_routes(offer: Offer) -> Counter[Route]:
    """The routes of a graph in order, and how often there is each."""
    found = Counter[Route]()
    for node in offer.graph.nodes:
        for index, kind in enumerate(node.types):
            if kind is not None:
                found.update(_routes(offer, Value(node.name, index)))
    for output in offer.graph.outputs:
        if output.value is not None and output.kind in ("gradient", "input_gradient"):
            found[_gradient_route(offer, output, output.value)] += offer.often(output.value.node)
    return found


def _routes(offer: Offer, value: Value) -> Mapping[Route, int]:
    """How often there is a route, one for each phase the value is used in. To be a result of the model is a use; what
    may run again may use it in backward."""
    by_phase: dict[str, dict[tuple[str, int], None]] = {}
    often = Counter[str]()
    for user, operand in offer.graph.users.get(value, ()):
        name = offer.class_of(user.name)
        often[user.phase] = max(often[user.phase], offer.often(user.name))
        by_phase.setdefault(user.phase, {})[name, operand] = None
        if user.phase == "forward" and offer.may_run_again(name):
            by_phase.setdefault("backward", {})[name, operand] = None
    if value in offer.results:
        by_phase.setdefault(offer.graph[value.node].phase, {})[OUTPUTS, 0] = None
    producer = offer.class_of(value.node)
    return {Route(producer, value.index, p, tuple(found)): max(1, often[p]) for p, found in by_phase.items()}


def _gradient_route(offer: Offer, output: Output, value: Value) -> Route:
    """To the parameter whose gradient ``value`` is, or out of the model for that of an input."""
    producer, consumer = offer.class_of(value.node), (OUTPUTS, 0)
    if output.kind == "gradient":
        consumer = offer.class_of(offer.graph.parameters[output.name].name), -1
    return Route(producer, value.index, "gradient", (consumer,))
