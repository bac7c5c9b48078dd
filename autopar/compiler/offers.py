"""What a plan's graph offers on the mesh, found once for all runs.

Lowering a planned step needs two things of the annotated graph: that every choice of the plan is on offer there, and
the placements through which tensors may be resharded. Both follow from the graph, the plan, the mesh and the code, so
they are cached under a hash of these. Later runs, and the other ranks, need not annotate.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from autopar.content.disk_cache import key_of, read, write
from autopar.content.source_hash import code_version
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_type
from autopar.ir.node import TensorType
from autopar.ir.placements import Shares, parse_placement
from autopar.passes.annotate.annotate import annotate, needs_finding
from autopar.passes.probe.found_rules import KNOWN, Known
from autopar.placement.prices import Options, placement_options
from autopar.planner.check_strategies import ChunkNodes, check_offered
from autopar.plans.plan import Plan
from autopar.runtime.comm.groups import AxisGroup

from .agreed_plan import plan_identity
from .rank_zero import on_first_rank

KIND = "offers"
Through = dict[TensorType, Options]


def offers(
    plan: Plan, graph: Graph, annotated: Callable[[Graph], Graph], ranks: AxisGroup, part: ChunkNodes | None = None
) -> Through:
    """:func:`autopar.placement.prices.placement_options` of the ``graph`` that ``plan`` is for, on its mesh or that of
    a ``part`` of its stages; ``annotated`` annotates it there. Collective over ``ranks``, on all of which plan and
    graph are the same. Raises :class:`PlanMismatchError` on every rank if a choice of the plan is not on offer."""

    def make() -> Through:
        whole = annotated(graph)
        check_offered(plan, whole, part)
        return placement_options(whole, plan.mesh if part is None else part.mesh)

    # Rules that are found are no part of the key, and finding them is collective.
    return make() if needs_finding(graph) else on_first_rank(ranks, lambda: _cached(_key(plan, graph, part), make))


def annotated_alike(graph: Graph, mesh: tuple[int, ...], ranks: AxisGroup, shares: Shares = ()) -> Graph:
    """The annotated ``graph``, with the rules that the first rank found for operations without one: ranks must agree on
    them, and one search is enough. Collective."""

    def find() -> Known:
        annotate(graph, mesh, shares)
        return KNOWN

    if needs_finding(graph):
        KNOWN.adopt(on_first_rank(ranks, find))
    return annotate(graph, mesh, shares)


def _cached(key: str, make: Callable[[], Through]) -> Through:
    text = read(KIND, key)
    if text is not None:
        try:
            return _parsed(text)
        except (AutoparError, ValueError, TypeError):  # Another process wrote it: made again.
            pass
    made = make()
    write(KIND, key, _text(made))
    return made


def _key(plan: Plan, graph: Graph, part: ChunkNodes | None) -> str:
    chunks = () if part is None else (str(part.chunks),)
    return key_of((code_version(), plan_identity(plan), " ".join(plan.nodes), graph.to_text(), *chunks))


def _text(through: Through) -> str:
    rows = [(str(kind), [[str(place) for place in axis] for axis in axes]) for kind, axes in through.items()]
    return json.dumps(rows)


def _parsed(text: str) -> Through:
    """What :func:`_text` wrote. Raises :class:`ValueError` or :class:`AutoparError` for other texts."""
    through: Through = {}
    for name, axes in json.loads(text):
        kind = parse_type(name, {})
        if kind is None:
            raise ValueError("no tensor has no type")
        through[kind] = tuple(tuple(parse_placement(place) for place in axis) for axis in axes)
    return through
