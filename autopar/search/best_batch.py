"""The batch with which a plan for inference computes most rows per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import InfeasibleError, OptionsError
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan

# How often the batch is doubled at most. Chosen: 65,536 times the given batch is more than any memory holds.
DOUBLINGS = 16


def best_batch(request: PlanRequest, plan_for: Callable[[PlanRequest], Plan]) -> Plan:
    """The plan of the batch with most rows per second: the batch of ``request`` is doubled until it does not fit into
    memory, or rows per second grow by less than the gap of the solver. ``plan_for`` plans one batch.

    Raises:
        InfeasibleError: not even the batch of the request fits.
        OptionsError: the model does not allow for other batches.
    """
    best = plan_for(request)
    if not request.graph.symbols:
        raise OptionsError(
            'objective="throughput" searches the batch, but the model was traced for this one alone: give 2 rows or '
            'more, or leave it at objective="latency"'
        )
    for doubling in range(1, DOUBLINGS + 1):
        try:
            larger = plan_for(replace(request, batch=request.batch * 2**doubling))
        except InfeasibleError:
            break
        if rows_per_second(larger) < (1 + request.options.gap) * rows_per_second(best):
            break
        best = larger
    return best


def rows_per_second(plan: Plan) -> float:
    """Rows of the batch that a step computes, by its predicted seconds. A step of generation computes one token for
    each row."""
    return plan.batch / plan.predicted.step_seconds
