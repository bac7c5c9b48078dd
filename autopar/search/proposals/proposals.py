"""Layouts for the search of a plan to try on many devices: the best by their estimates.

Enumerating stages by solving a placement program of all layers for each takes too long where there are many devices.
Programs of few layers, unfolded to all, estimate the step of any division in stages at the prices of plans. The search
then solves the few best, as restrictions."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.layout import Layout, divisors
from autopar.planner.request import PlanRequest, Proposals, memory_limit_of
from autopar.planner.roles.expert_blocks import expert_blocks

from .few_layer_step import FewLayerStep
from .mixtures import MixtureRanking
from .ranking import Ranking
from .stage_programs import StagePrograms, division

# How many layouts are proposed. Chosen: solving one takes as long as estimating all.
PROPOSED = 2


def proposed_layouts(request: PlanRequest) -> Proposals:
    """The layouts with pipeline stages that are estimated to be quickest for ``request``, each with other degrees, and
    that of the rule of thumb. None if the model has no layers that could be divided, if nothing fits, or if all take
    longer than it is worth."""
    ranking = _ranking_of(request)
    if ranking is None:
        return Proposals()
    rule = rule_of_thumb(ranking)  # First: its program tells what many others take at least.
    found: dict[tuple[int, int], Layout] = {}
    slow, slow_seconds = None, math.inf
    for layout in ranking.best_first(request.worth):
        if ranking.known[layout] > request.worth:
            slow, slow_seconds = layout, ranking.known[layout]
            break
        found.setdefault((layout.tensor, layout.pipeline), layout)
        if len(found) == PROPOSED:
            break
    quick = {each: ranking.bound(each) for each in ranking.every() if (each.tensor, each.pipeline) in found}
    quick |= {} if rule is None else {rule: ranking.estimate(rule)}
    proposals = Proposals(tuple(found.values()), rule, quick, slow=slow, slow_seconds=slow_seconds)
    estimated = {layout: seconds for layout, seconds in ranking.estimated.items() if math.isfinite(seconds)}
    return replace(proposals, layouts=tuple(filter(proposals.is_near, proposals.layouts)), estimated=estimated)


def _ranking_of(request: PlanRequest) -> Ranking | None:
    """The ranking for a request, one whatever a step is worth; None if its model has no layers to be divided."""

    def make() -> Ranking | None:
        own = replace(request, worth=math.inf)  # Of steps: a program of one stage takes other seconds.
        step = FewLayerStep.of(own)
        if step is None:
            return None
        return (MixtureRanking if expert_blocks(step.graph) else Ranking)(own, StagePrograms(step))

    of = request.graph, request.cluster, request.options
    return request.shared.once("ranking", of, request.batch, request.mesh, memory_limit_of(request), make=make)


def rule_of_thumb(ranking: Ranking) -> Layout | None:
    """As many tensor ranks as a node has devices, the fewest pipeline stages that fit, and the remaining devices as
    data ranks. Microbatches have one sample. None if no number of stages fits."""
    devices, tensor = math.prod(ranking.request.mesh), ranking.node
    for stages in divisors(devices // tensor):
        rule = division(tensor, stages, devices // (tensor * stages), 1)
        if ranking.request.batch % rule.data == 0 and math.isfinite(ranking.estimate(rule)):
            return rule
    return None
