"""The search for plans, loaded only when a plan is made.

Solvers and their libraries take more than a second of a processor to import on every rank. A
training whose plan is in the cache, or given, needs none of them.
"""

from __future__ import annotations

from autopar.planner.request import PlanRequest, Proposals
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan


def best_plan(request: PlanRequest, timings: Timings) -> Plan:
    """:func:`autopar.search.best_plan.best_plan`."""
    from autopar.search.best_plan import best_plan as found

    return found(request, timings)


def proposed_layouts(request: PlanRequest) -> Proposals:
    """:func:`autopar.search.proposals.proposals.proposed_layouts`."""
    from autopar.search.proposals.proposals import proposed_layouts as found

    return found(request)
