"""Layouts for the search of a plan to try on many devices: the best by their estimates.

Enumerating stages by solving a placement program of all layers for each takes too long where there are many devices.
Programs of few layers, unfolded to all, estimate the step of any division in stages at the prices of plans. The search
then solves the few best, as restrictions."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.layout import divisors
from autopar.planner.request import PlanRequest, Proposals

from .few_layer_step import FewLayerStep
from .mixtures import MixtureRanking, has_experts
from .ranking import Degrees, Ranking
from .stage_programs import StagePrograms

# How many layouts are proposed. Chosen: solving one takes as long as estimating all.
PROPOSED = 2


def proposed_layouts(request: PlanRequest) -> Proposals:
    """The layouts with pipeline stages that are estimated to be quickest for ``request``, each with other degrees, and
    that of the rule of thumb. None if the model has no layers that could be divided, or if nothing fits."""
    step = FewLayerStep.of(request)
    if step is None:
        return Proposals()
    ranking = (MixtureRanking if has_experts(step.graph) else Ranking)(request, StagePrograms(step))
    found: dict[tuple[int, ...], Degrees] = {}
    for division in ranking.best_first():
        found.setdefault(division.ranks, division)
        if len(found) == PROPOSED:
            break
    rule = rule_of_thumb(ranking)
    quick = {d.layout: ranking.bound(d) for d in ranking.every() if d.ranks in found}
    quick |= {} if rule is None else {rule.layout: ranking.estimate(rule)}
    layouts = tuple(division.layout for division in found.values())
    proposals = Proposals(layouts, None if rule is None else rule.layout, quick)
    estimated = {d.layout: ranking.known[d] for d in sorted(ranking.estimated) if math.isfinite(ranking.known[d])}
    return replace(proposals, layouts=tuple(filter(proposals.is_near, layouts)), estimated=estimated)


def rule_of_thumb(ranking: Ranking) -> Degrees | None:
    """As many tensor ranks as a node has devices, the fewest pipeline stages that fit, and the remaining devices as
    data ranks. Microbatches have one sample. None if no number of stages fits."""
    devices, tensor = math.prod(ranking.request.mesh), ranking.node
    for stages in divisors(devices // tensor):
        rule = Degrees(tensor, stages, devices // (tensor * stages), 1)
        if ranking.request.batch % rule.data == 0 and math.isfinite(ranking.estimate(rule)):
            return rule
    return None
