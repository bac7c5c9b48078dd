"""Options beside a plan that was made before: they may not ask for another plan."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import PlanMismatchError
from autopar.ir.plan_record import PlanRecord
from autopar.options import Options, under_policy
from autopar.restriction import words_of


def options_under(options: Options, plan: PlanRecord) -> Options:
    """``options`` with the precision that ``plan`` was made for. Raises :class:`PlanMismatchError` if they ask for what
    it is not. Whether a plan was searched under ``zero`` or ``recompute`` cannot be told from it: these are not
    compared, but for a plan that recomputes under ``recompute="none"``."""
    for asked, found in _contradictions(options, plan):
        raise PlanMismatchError(
            f"Options({asked}) is asked for, but the plan that is given has {found}: leave the option out to run as "
            "planned, or make a plan with it"
        )
    return under_policy(options, plan.precision)


def _contradictions(options: Options, plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """What is asked for, and what the plan has instead."""
    for name in ("stages", "microbatches", "schedule"):
        asked, found = getattr(options, name), getattr(plan, name)
        if asked not in (None, found):
            yield f"{name}={asked!r}", f"{name}={found!r}"
    if options.recompute == "none" and plan.recomputed:
        yield "recompute='none'", f"{len(plan.recomputed)} operations that are recomputed"
    offloads = any(place.offload for place in plan.parameters.values())
    if options.offload is False and offloads:
        yield "offload=False", "optimizer state in host memory"
    if options.pins and dict(options.pins) != dict(plan.pinned):
        yield f"pins={dict(options.pins)}", f"pins={dict(plan.pinned)}"
    if options.layout is not None and options.layout.restriction != plan.layout:
        yield f"layout={words_of(options.layout)}", f"the layout {plan.layout!r}" if plan.layout else "no layout"
    if options.memory_limit is not None and plan.predicted.peak_bytes > options.memory_limit:
        yield f"memory_limit={options.memory_limit}", f"a peak of {plan.predicted.peak_bytes} bytes"
