"""Of plans for several limits of memory: for each limit the quickest that fits, whichever limit it was found for.

Placements are sought anew for each limit, to a gap, so that those found with less memory may be quicker than those
found with more. They fit there as well. What is proven of them there is another thing: a bound holds for the limit that
it was proven for, and for smaller ones. So where a plan is taken for a larger limit, its bound is the highest proven,
for that limit or a larger one, of the same program: for plans on the same mesh, with the rows in the same shares, and
with as many stages and microbatches. Where there is none, nothing is proven, and its gap is 100%; nor where stages have
meshes of their own, since a plan names the bound on one of these.

Nothing of this holds for other changes: a plan is of so many devices, of samples, of a precision and a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.quantities import size
from autopar.plans.views.what_if import Answer, samples, step_seconds

AnyPlan = TypeVar("AnyPlan", bound=PlanRecord)


def quickest_within(
    answers: Sequence[Answer[AnyPlan]], asked: AnyPlan, gap: float, alone_first: bool
) -> list[Answer[AnyPlan]]:
    """``answers`` for several limits of memory, each with the quickest plan of all of them, and of the plan that was
    ``asked``, that fits. ``gap``: that within which a plan is called optimal. ``alone_first``: whether plans with
    stages, though predicted to be quicker, do not replace those without (:mod:`autopar.search.best_plan`)."""
    plans = [asked, *(answer.plan for answer in answers if answer.plan is not None)]
    found = []
    for answer in answers:
        own = answer.plan
        limit = _limit(answer, plans)
        fitting = [plan for plan in plans if _fits(plan, limit) and not (alone_first and _has_more_stages(plan, own))]
        best = min(fitting, key=_seconds_of_sample, default=None)
        if best is not None and (own is None or _seconds_of_sample(best) < _seconds_of_sample(own)):
            found.append(replace(answer, plan=_taken(best, own, limit, plans, gap), error=""))
        else:
            found.append(answer if own is not None else _with_fewest(answer, plans))
    return found


def _with_fewest(answer: Answer[AnyPlan], plans: Iterable[PlanRecord]) -> Answer[AnyPlan]:
    """An answer without a plan, which says of ``plans`` what the smallest holds if that is less than what was found to
    be enough when this was asked alone."""
    least = min((plan.predicted.peak_bytes for plan in plans if _fits(plan, plan.least_limit)), default=math.inf)
    if answer.needed_bytes is None or least >= answer.needed_bytes:
        return answer
    known = (
        f"{answer.error.rstrip('.')}. A plan for another limit of this table holds less: {least} bytes ({size(least)})"
    )
    return replace(answer, error=known, needed_bytes=int(least))


def _limit(answer: Answer[PlanRecord], plans: Iterable[PlanRecord]) -> int:
    """The bytes that a plan may hold for ``answer``: no more than the smallest device has, since plans that say what
    each holds of which limit are left out."""
    if answer.plan is not None:
        return answer.plan.least_limit
    return min(answer.amount, max(plan.least_limit for plan in plans))


def _fits(plan: PlanRecord, limit: int) -> bool:
    """Whether a plan is known to fit. Those on devices of different memory say what each holds of which limit, and are
    left out."""
    is_equal = not plan.device_limits and (plan.pipeline is None or not plan.pipeline.limits)
    return is_equal and plan.predicted.peak_bytes <= limit


def _has_more_stages(plan: PlanRecord, own: PlanRecord | None) -> bool:
    return own is not None and own.stages == 1 < plan.stages


def _seconds_of_sample(plan: PlanRecord) -> float:
    """An objective may be of the batch, too."""
    return step_seconds(plan) / samples(plan)


def _taken(best: AnyPlan, own: AnyPlan | None, limit: int, plans: Iterable[AnyPlan], gap: float) -> AnyPlan:
    """The plan ``best`` under another ``limit``, for which search had found ``own``; so what search has compared is
    what that says."""
    alike = (plan for plan in plans if plan.least_limit >= limit and _program(plan) == _program(best))
    proven = (plan.bound for plan in alike if plan.stage_meshes.are_equal)
    bound = min(max(proven, default=0.0), best.objective)
    left = 1.0 - bound / best.objective if best.objective > 0.0 else 0.0
    compared = best if own is None else own
    return replace(
        best,
        memory_limit=limit,
        bound=bound,
        gap=left,
        status="optimal" if left <= gap else "feasible",
        baselines=compared.baselines,
        excluded=compared.excluded,
        searched=compared.searched,
    )


def _program(plan: PlanRecord) -> tuple[object, ...]:
    """What the placement program of a plan depends on besides memory."""
    return plan.graph_hash, plan.batch, plan.stage_meshes, plan.shares, plan.microbatches, plan.schedule
