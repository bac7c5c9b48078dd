"""Layouts for the search of a plan to try on many devices: the best that quick prices find.

Enumerating stages by solving a placement program for each takes too long where there are many devices and layers. The
prices of :func:`autopar.plan_layouts` cover thousands of layouts in seconds; the search then solves the few best, as
restrictions, and decides by its own prices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.layout import Layout
from autopar.planner.request import NEAR, PlanRequest, Proposals, memory_limit_of
from autopar.precision import Precision
from autopar.restriction import Restriction

from .model import LayoutModel
from .precision import DTYPES
from .search import LayoutSearchResult, best_layout
from .space import PLANNED, degrees_of

# How many layouts are proposed. Chosen: solving one takes as long as pricing all.
PROPOSED = 2


def proposed_layouts(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    request: PlanRequest,
) -> Proposals:
    """The layouts with pipeline stages that are predicted to be quickest for ``request``, each with other degrees, and
    that of the rule of thumb. None if the model has no layers that could be divided, or if nothing fits."""
    precision = request.options.precision or _precision_of(model)
    try:
        found = best_layout(
            LayoutModel.of_call(model, args, kwargs, loss_fn, DTYPES[precision]),
            request.cluster,
            math.prod(request.mesh),
            batch=request.batch,
            limit=memory_limit_of(request),
            like=Layout(precision=precision),
            space=PLANNED,
            near=NEAR,
        )
    except AutoparError:  # Layouts are for models of layers; others are planned without proposals.
        return Proposals()
    proposed: dict[tuple[int, ...], Layout] = {}
    quick: dict[Layout, float] = {}
    for priced in found.ranked:
        layout = _restriction(priced.layout)
        quick.setdefault(layout, priced.predicted.step_seconds)
        if layout.pipeline > 1:
            proposed.setdefault(degrees_of(layout), layout)
    rule = None if found.rule is None else _restriction(found.rule.layout)
    if found.rule is not None and rule is not None:
        quick.setdefault(rule, found.rule.predicted.step_seconds)
    proposals = Proposals(tuple(proposed.values()), rule, _bounds(found, proposed, memory_limit_of(request)) | quick)
    return replace(proposals, layouts=tuple(filter(proposals.is_near, proposals.layouts))[:PROPOSED])


def _bounds(found: LayoutSearchResult, degrees: Collection[tuple[int, ...]], limit: int) -> dict[Layout, float]:
    """Of everything that was tried with one of ``degrees``, the least seconds of each restriction; infinite if nothing
    in it fits."""
    seconds: dict[Layout, float] = {}
    for quick in found.tried:
        if degrees_of(quick.layout) in degrees:
            layout = _restriction(quick.layout)
            own = quick.seconds if quick.peak <= limit else math.inf
            seconds[layout] = min(own, seconds.get(layout, math.inf))
    return seconds


def _precision_of(model: nn.Module) -> Precision:
    """The precision in which most parameters are."""
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    most = max(set(dtypes), key=dtypes.count, default=torch.float32)
    names: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(most, "fp32")


def _restriction(layout: Layout) -> Layout:
    """The degrees and microbatches of a layout. The schedule, what rests where, and what is recomputed the search
    decides: quick prices and plans count these differently (ZeRO-1 of a layout scatters gradients, as ZeRO-2 of a
    plan)."""
    names = [field.name for field in fields(Restriction) if field.name != "interleave"]
    return Layout(**{name: getattr(layout, name) for name in names})
