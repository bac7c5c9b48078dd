"""The error for a pipeline that does not fit. It names a limit within which a pipeline was found, and what would lower
that limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.planner.memory_advice import (
    ADVICE,
    LEAST_SEARCHES,
    LESS_STATE,
    Advice,
    AdviceBudget,
    listed,
    offload_more,
    recompute_more,
    single_change,
    twice_the_devices,
)
from autopar.planner.request import UNLIMITED, PlanRequest, asked_mesh, memory_limit_of
from autopar.plans.views.quantities import microbatches_text, size

from .stage_meshes import StageLayout

# The factor by which a limit that fits is lowered. Chosen: each try plans once more, and takes long.
LOWER = 0.8
# How near a limit that fits is to one that does not, relative to it, where neither is sought further. Chosen, as above.
NEAR_LEAST = 0.9

_SMALLER = "smaller limits of pipelines"

# Returns the bytes of the fullest device of the pipeline found under the options within a limit; None if none is found.
Peak = Callable[[Options, int], int | None]


@dataclass(frozen=True)
class Enough:
    """A limit within which a pipeline was found. ``is_least``: whether none was found within much less; otherwise that
    was not searched."""

    bytes: int
    is_least: bool


def pipeline_infeasible(
    request: PlanRequest,
    layout: StageLayout,
    microbatches: int,
    start: int | None,
    peak: Peak,
    budget: AdviceBudget,
) -> InfeasibleError | None:
    """The error for ``request``, whose pipelines do not fit. It names a sufficient limit for the pipeline with this
    ``layout`` and number of ``microbatches``, sought from ``start``. None if none was found."""
    limit = memory_limit_of(request)
    stages = layout.described if layout.stages > 1 else "one stage"
    problem = f"no plan in {stages} on mesh {asked_mesh(request)} fits into {size(limit)} per device"
    enough = smallest_limit(request.options, peak, budget, start, limit)
    if enough is None:
        return None
    least = enough.bytes
    count = microbatches_text(microbatches)
    settings = f"memory_limit={least}, stages={layout.counts or layout.stages}, microbatches={microbatches}"
    advice = [*_advice(request, layout, microbatches, least, partial(smallest_limit, peak=peak, budget=budget))]
    others = "" if request.options.microbatches else " Other numbers of microbatches, not searched, may need less."
    needed = f"{least} bytes ({size(least)}) are enough" if enough.is_least else f"at most {least} bytes are needed"
    return InfeasibleError(
        f"{problem}. With {count} {needed}, {least - limit} ({size(least - limit)}) "
        f"more: Options({settings}).{ADVICE}{listed(advice)}. "
        f"{single_change(advice, limit)}{others}{budget.remark}"
    ).needing(least)


def smallest_limit(
    options: Options, peak: Peak, budget: AdviceBudget, start: int | None = None, below: int = 0
) -> Enough | None:
    """About the smallest limit within which a pipeline can be found, as far as the ``budget`` tells: from ``start``, or
    what the quickest pipeline holds, upwards, then below what the pipelines that were found hold, and above ``below``,
    in which none was found. None if no pipeline was found."""
    limit = start if start is not None else peak(options, UNLIMITED) if budget.allows(_SMALLER) else None
    share = LOWER
    if limit is None or not budget.allows(_SMALLER):
        return None
    while (held := peak(options, limit)) is None:
        if not budget.allows(_SMALLER):
            return None
        # In larger and larger steps: each try takes long, and a limit that is enough is what a user needs first.
        if limit > UNLIMITED:  # What binds is the memory of devices that differ.
            return None
        below, share = limit, share * share
        limit = math.ceil(limit / share)
    while (lower := _next_below(limit, held, below)) is not None:
        # What is left is for other advice, but for the one limit in which something is known to fit.
        if budget.searches < (1 if lower == held else LEAST_SEARCHES) or not budget.allows(_SMALLER):
            return Enough(limit, is_least=False)
        found = peak(options, lower)
        limit, held, below = (limit, held, lower) if found is None else (lower, found, below)
    return Enough(limit, is_least=True)


def _next_below(limit: int, held: int, below: int) -> int | None:
    """The limit to try next, between ``limit``, in which a pipeline was found that has ``held`` bytes, and ``below``,
    in which none was (0: unknown): what it holds, if that is far less, then between, or still less. None if these are
    near each other. What a pipeline counts that fits by what was measured may be above the limit."""
    if limit <= below / NEAR_LEAST:
        return None
    held = min(held, limit)
    if below < held < NEAR_LEAST * limit:
        return held
    return math.ceil(math.sqrt(below * (held if held > below else limit))) if below else math.ceil(LOWER * held)


def _advice(
    request: PlanRequest,
    layout: StageLayout,
    microbatches: int,
    least: int,
    smallest: Callable[[Options], Enough | None],
) -> Iterator[Advice]:
    """Changes that help, with the bytes per device that each of them leads to."""
    options, device = request.options, request.cluster.device
    may_offload = options.offload is False and (device.has_host or device.has_nvme)
    useful = (options.recompute in ("none", "selective"), may_offload)
    for (text, changed), helps in zip((recompute_more(options), offload_more(options)), useful, strict=True):
        lower = smallest(changed) if helps else None
        if lower is not None and lower.bytes < least:
            yield Advice(text, lower.bytes)
    if microbatches < request.batch:
        yield Advice("more microbatches, each with fewer samples", None)
    if options.zero is not None and max(layout.sizes) > 1:
        yield Advice("zero=None, so that weights, gradients and state may rest in shards", None)
    yield twice_the_devices(least)
    yield Advice(LESS_STATE, None)
