"""What to say of a pipeline that fits into no device: a limit in which it was found to fit, and what would lower it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .errors import InfeasibleError
from .optimizers import ELEMENTWISE
from .options import Options
from .plan_units import size
from .planner import Question
from .stage_meshes import StageMeshes

# For how long, and by how much at a time, a limit that fits is lowered; by less where that fails.
SECONDS, LOWER, FINEST = 10.0, 0.8, 0.97

# More bytes than any pipeline holds.
UNLIMITED = 2**60

# The bytes of the fullest device of the pipeline that is found under such options within a limit; None if none is.
Peak = Callable[[Options, int], int | None]


def pipeline_infeasible(
    question: Question, layout: StageMeshes, microbatches: int, limit: int, peak: Peak
) -> InfeasibleError | None:
    """The error for ``question``, whose pipelines do not fit into ``limit`` bytes per device; what would is said of the
    one with ``layout`` and so many ``microbatches``. None if no memory is enough: something else is in the way."""
    options = question.options
    what = f"{layout.stages} stages" if layout.stages > 1 else "one stage"
    said = f"no plan in {what} on mesh {question.mesh} fits into {size(limit)} per device"
    least = smallest_limit(options, peak)
    if least is None:
        return None
    asked = f"memory_limit={least}, stages={layout.stages}, microbatches={microbatches}"
    advice = "; ".join(_advice(question, layout, microbatches, least, peak))
    return InfeasibleError(
        f"{said}. With {microbatches} microbatch{'es' * (microbatches > 1)} {least} bytes ({size(least)}) are enough: "
        f"Options({asked}). What would lower it: {advice}."
    )


def smallest_limit(options: Options, peak: Peak) -> int | None:
    """A limit in which a pipeline was found, about the smallest; None if there is none at all."""
    end = time.monotonic() + SECONDS
    found = peak(options, UNLIMITED)
    while found is not None and peak(options, found) is None and time.monotonic() < end:
        found = math.ceil(found / LOWER)
    share = LOWER
    while found is not None and time.monotonic() < end and share < FINEST:
        lower = math.ceil(share * found)
        found, share = (found, math.sqrt(share)) if peak(options, lower) is None else (lower, share)
    return found


def _advice(question: Question, layout: StageMeshes, microbatches: int, least: int, peak: Peak) -> Iterator[str]:
    """Changes that help, with the bytes per device they come to."""
    options, device = question.options, question.cluster.device
    wider = {
        "recompute=None or 'full'": replace(options, recompute=None),
        "offload=None or True": replace(options, offload=None),
    }
    useful = {
        "recompute=None or 'full'": options.recompute in ("none", "selective"),
        "offload=None or True": options.offload is False and device.has_host and options.optimizer in ELEMENTWISE,
    }
    for text, asked in wider.items():
        found = smallest_limit(asked, peak) if useful[text] else None
        if found is not None and found < least:
            yield f"{text}, {size(found)}"
    if microbatches < question.batch:
        yield "more microbatches, each with fewer samples"
    if options.zero is not None and math.prod(layout.mesh) > 1:
        yield "zero=None, so that weights, gradients and state may rest in shards"
    yield f"twice the devices, about {size(least / 2)} if all divides"
    yield "an optimizer with less state"
