"""The error for a pipeline that does not fit. It names a limit within which a pipeline was found, and what would lower
that limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.planner.memory_advice import LESS_STATE, offload_more, recompute_more, twice_the_devices
from autopar.planner.request import PlanRequest
from autopar.plans.views.quantities import size

from .stage_meshes import StageLayout

# The factor by which a limit that fits is lowered at a time. It moves towards 1, at most to FINEST, as attempts fail.
# Chosen: the named limit is within 2% of the smallest that was found to fit.
LOWER, FINEST = 0.8, 0.98
# How many pipelines, times operations of the graph, are searched for the limit, within two bounds. Their number is
# fixed and the work of each search is counted, so that the same limit is named on every machine.
# Chosen, not measured.
EFFORT, LEAST_TRIES, MOST_TRIES = 4000, 4, 12

# More bytes than any pipeline holds.
UNLIMITED = 2**60

# Returns the bytes of the fullest device of the pipeline found under the options within a limit; None if none is found.
Peak = Callable[[Options, int], int | None]


def pipeline_infeasible(
    request: PlanRequest, layout: StageLayout, microbatches: int, limit: int, peak: Peak
) -> InfeasibleError | None:
    """The error for ``request``, whose pipelines do not fit into ``limit`` bytes per device. It names a sufficient
    limit for the pipeline with this ``layout`` and number of ``microbatches``. None if no sufficient limit was
    found."""
    options = request.options
    stages = layout.described if layout.stages > 1 else "one stage"
    problem = f"no plan in {stages} on mesh {request.mesh} fits into {size(limit)} per device"
    tries = max(LEAST_TRIES, min(EFFORT // len(request.graph.nodes), MOST_TRIES))
    least = smallest_limit(options, peak, tries)
    if least is None:
        return None
    settings = f"memory_limit={least}, stages={layout.counts or layout.stages}, microbatches={microbatches}"
    advice = "; ".join(_advice(request, layout, microbatches, least, partial(smallest_limit, peak=peak, tries=tries)))
    return InfeasibleError(
        f"{problem}. With {microbatches} microbatch{'es' * (microbatches > 1)} {least} bytes ({size(least)}) are "
        f"enough: Options({settings}). What would lower it: {advice}."
    ).needing(least)


def smallest_limit(options: Options, peak: Peak, tries: int) -> int | None:
    """About the smallest limit within which a pipeline can be found, as far as ``tries`` searches tell. None if none of
    them finds a pipeline."""
    limit, share = peak(options, UNLIMITED), LOWER
    while limit is not None and peak(options, limit) is None:
        limit, tries = math.ceil(limit / LOWER) if tries else None, tries - 1
    if limit is None:
        return None
    for _ in range(tries - 1):
        lower = math.ceil(share * limit)
        limit, share = (limit, math.sqrt(share)) if peak(options, lower) is None else (lower, share)
        if share >= FINEST:
            break
    return limit


def _advice(
    request: PlanRequest,
    layout: StageLayout,
    microbatches: int,
    least: int,
    smallest: Callable[[Options], int | None],
) -> Iterator[str]:
    """Changes that help, with the bytes per device that each of them leads to."""
    options, device = request.options, request.cluster.device
    may_offload = options.offload is False and (device.has_host or device.has_nvme)
    useful = (options.recompute in ("none", "selective"), may_offload)
    for (text, changed), helps in zip((recompute_more(options), offload_more(options)), useful, strict=True):
        lower = smallest(changed) if helps else None
        if lower is not None and lower < least:
            yield f"{text}, {size(lower)}"
    if microbatches < request.batch:
        yield "more microbatches, each with fewer samples"
    if options.zero is not None and max(layout.sizes) > 1:
        yield "zero=None, so that weights, gradients and state may rest in shards"
    yield twice_the_devices(least)
    yield LESS_STATE
