"""The search for plans, loaded only when a plan is made.

Solvers, their libraries and the prices of layouts take more than a second of a processor to import on every rank. A
training whose plan is in the cache, or given, needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.planner.request import PlanRequest, Proposals
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan


def best_plan(request: PlanRequest, timings: Timings) -> Plan:
    """:func:`autopar.search.best_plan.best_plan`."""
    from autopar.search.best_plan import best_plan as found

    return found(request, timings)


def proposed_layouts(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    request: PlanRequest,
) -> Proposals:
    """:func:`autopar.layouts.proposals.proposed_layouts`."""
    from autopar.layouts.proposals import proposed_layouts as found

    return found(model, args, kwargs, loss_fn, request)
