"""Whether each operation of a graph can run as a plan says: its strategy is one that the rules offer.

Rules are proven by execution, so a strategy that is not among theirs may compute something else without any error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autopar.errors import PlanMismatchError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import RECOMPUTED, Node
from autopar.ir.placements import Placements, Strategy, short
from autopar.passes.recompute.recomputable import recomputable
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.parameter_choices import parameter_choices
from autopar.placement.placed_step import trained
from autopar.plans.plan import Plan

# Strategies that a message names. Chosen: what a reader takes in.
SHOWN = 3
_COPY = re.compile(r"_at\d+(_\d+)?$")


def check_offered(plan: Plan, graph: Graph) -> None:
    """Compares a valid ``plan`` with the annotated ``graph`` it is to run.

    Raises:
        PlanMismatchError: names the node or parameter, what the plan says and the nearest that is offered.
    """
    names = [node.name for node in graph.nodes]
    copies = {name + RECOMPUTED for name in plan.recomputed} | _repeated(plan, graph)
    _check_names("node", (plan.nodes.keys() | plan.strategies.keys()) - copies, names)
    _check_names("parameter", plan.parameters, [node.target for node in graph.placeholders("param")])
    for node in graph.placeholders("param"):
        _check_parameter(plan.parameters[node.target], node, graph)
    offered: dict[int, frozenset[Strategy]] = {}
    for name, strategy in plan.strategies.items():
        node = graph[name if name in graph else _original(name)]
        # Equal calls share one list.
        listed = graph.strategies[node.name]
        if strategy not in offered.setdefault(id(listed), frozenset(listed)):
            raise PlanMismatchError(_refused(name, node, strategy, listed))
    _check_recomputed(plan, graph)


def _repeated(plan: Plan, graph: Graph) -> set[str]:
    """What several chunks of a pipeline compute: the copies are named after the chunk, and placed as the chunk needs
    them."""
    if plan.pipeline is None:
        return set()
    return {name for name in plan.nodes if name not in graph and _original(name) in graph}


def _original(name: str) -> str:
    """The node of which ``name`` is a copy, in another chunk or to compute it again."""
    return _COPY.sub("", name).removesuffix(RECOMPUTED)


def _check_names(what: str, found: Iterable[str], expected: Sequence[str]) -> None:
    known, named = set(expected), set(found)
    for name in sorted(named - known):
        raise PlanMismatchError(f"the plan has a {what} {name!r} that the model has not{did_you_mean(name, expected)}")
    for name in sorted(known - named):
        raise PlanMismatchError(f"the plan says nothing of the {what} {name!r}; make a plan for this model")


def _check_parameter(place: ParameterPlacement, node: Node, graph: Graph) -> None:
    choices = parameter_choices(graph.strategies[node.name], node.target in trained(graph))
    plain = ParameterPlacement(place.weight, place.gradient, place.optimizer)
    if plain not in choices:
        near = sorted(choices, key=lambda one: _apart(_three(one), _three(plain)))[:SHOWN]
        raise PlanMismatchError(
            f"the parameter {node.target!r} cannot rest as weight, gradient and optimizer state {_said(plain)}; "
            f"nearest to it {' or '.join(map(_said, near))}"
        )


def _three(place: ParameterPlacement) -> tuple[Placements, ...]:
    return place.weight, place.gradient, place.optimizer


def _said(place: ParameterPlacement) -> str:
    return ", ".join(map(short, _three(place)))


def _apart(first: Sequence[Placements], second: Sequence[Placements]) -> int:
    """In how many placements two choices differ."""
    if len(first) != len(second):
        return 1 << 20
    pairs = (pair for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=False))
    return sum(a != b for a, b in pairs)


def _refused(name: str, node: Node, strategy: Strategy, offered: Sequence[Strategy]) -> str:
    near = sorted(offered, key=lambda one: _apart(one.places, strategy.places))[:SHOWN]
    where = f" in {node.module!r}" if node.module else ""
    return (
        f"the plan runs {name!r} ({node.op}{where}) as {strategy}, which its rule does not offer; nearest to it "
        f"{' or '.join(map(str, near))}"
    )


def _check_recomputed(plan: Plan, graph: Graph) -> None:
    if not plan.recomputed:
        return
    possible = recomputable(graph).nodes
    for name in plan.recomputed:
        if name not in possible:
            raise PlanMismatchError(f"the plan recomputes {name!r}, which cannot be had again; leave it out")
    names = {node.target: node.name for node in graph.placeholders("param")}
    whole, _ = recomputed(graph, plan.assignment(names))
    _check_names("node", plan.nodes.keys() - _repeated(plan, graph), [node.name for node in whole.nodes])
