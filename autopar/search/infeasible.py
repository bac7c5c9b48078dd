"""What to say of a pipeline that fits into no device: a limit in which it was found to fit, and what would lower it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from autopar.errors import InfeasibleError
from autopar.optimizers import ELEMENTWISE
from autopar.options import Options
from autopar.planner.memory_advice import LESS_STATE, offload_more, recompute_more, twice_the_devices
from autopar.planner.request import PlanRequest
from autopar.plans.views.quantities import size

from .stage_meshes import StageLayout

# By how much at a time a limit that fits is lowered; by less where that fails.
# Chosen: the named limit is within 2% of the smallest that was found to fit.
LOWER, FINEST = 0.8, 0.98
# How often a pipeline is sought for it, times the operations of the graph, within two bounds: counted, as the work of
# each search is, so that the same limit is named on every machine.
# Chosen, not measured.
EFFORT, LEAST_TRIES, MOST_TRIES = 4000, 4, 12

# More bytes than any pipeline holds.
UNLIMITED = 2**60

# The bytes of the fullest device of the pipeline that is found under such options within a limit; None if none is.
Peak = Callable[[Options, int], int | None]


def pipeline_infeasible(
    request: PlanRequest, layout: StageLayout, microbatches: int, limit: int, peak: Peak
) -> InfeasibleError | None:
    """The error for ``request``, whose pipelines do not fit into ``limit`` bytes per device; what would is said of the
    one with ``layout`` and so many ``microbatches``. None if none was found to be enough."""
    options = request.options
    what = f"{layout.stages} stages" if layout.stages > 1 else "one stage"
    said = f"no plan in {what} on mesh {request.mesh} fits into {size(limit)} per device"
    tries = max(LEAST_TRIES, min(EFFORT // len(request.graph.nodes), MOST_TRIES))
    least = smallest_limit(options, peak, tries)
    if least is None:
        return None
    asked = f"memory_limit={least}, stages={layout.stages}, microbatches={microbatches}"
    advice = "; ".join(_advice(request, layout, microbatches, least, partial(smallest_limit, peak=peak, tries=tries)))
    return InfeasibleError(
        f"{said}. With {microbatches} microbatch{'es' * (microbatches > 1)} {least} bytes ({size(least)}) are enough: "
        f"Options({asked}). What would lower it: {advice}."
    )


def smallest_limit(options: Options, peak: Peak, tries: int) -> int | None:
    """A limit in which a pipeline was found, about the smallest that so many ``tries`` come to, and one more at last;
    None if none was found in any of them."""
    found, share = peak(options, UNLIMITED), LOWER
    while found is not None and peak(options, found) is None:
        found, tries = math.ceil(found / LOWER) if tries else None, tries - 1
    if found is None:
        return None
    for _ in range(tries - 1):
        lower = math.ceil(share * found)
        found, share = (found, math.sqrt(share)) if peak(options, lower) is None else (lower, share)
        if share >= FINEST:
            break
    return found


def _advice(
    request: PlanRequest,
    layout: StageLayout,
    microbatches: int,
    least: int,
    smallest: Callable[[Options], int | None],
) -> Iterator[str]:
    """Changes that help, with the bytes per device they come to."""
    options, device = request.options, request.cluster.device
    may_offload = options.offload is False and device.has_host and options.optimizer in ELEMENTWISE
    useful = (options.recompute in ("none", "selective"), may_offload)
    for (text, asked), helps in zip((recompute_more(options), offload_more(options)), useful, strict=True):
        found = smallest(asked) if helps else None
        if found is not None and found < least:
            yield f"{text}, {size(found)}"
    if microbatches < request.batch:
        yield "more microbatches, each with fewer samples"
    if options.zero is not None and math.prod(layout.mesh) > 1:
        yield "zero=None, so that weights, gradients and state may rest in shards"
    yield twice_the_devices(least)
    yield LESS_STATE
