"""The error for a layout that does not fit: by how many bytes, and which single change of it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.plan_record import Predicted
from autopar.layout import Layout
from autopar.planner.memory_advice import ADVICE, AdviceBudget
from autopar.planner.request import PlanRequest, memory_limit_of
from autopar.plans.views.quantities import duration, size
from autopar.restriction import words_of

from .never_fits import never_fits

# Changes that fit and are named. Chosen: a first one may be impossible for reasons that only the user knows.
NAMED = 2

# Counted seconds of the solvers for a change. Chosen: a fit is looked for, and not the best plan.
TRIAL_SECONDS = 10.0

# What the quickest plan for a request is predicted to take. Raises InfeasibleError or OptionsError if there is none.
Predict = Callable[[PlanRequest], Predicted]


def layout_infeasible(
    request: PlanRequest, error: InfeasibleError, predict: Predict, budget: AdviceBudget
) -> InfeasibleError:
    """``error`` with the bytes by which the layout of ``request`` is too big, and the single changes of a field that
    were found to fit. ``predict`` plans each change, so that the advice holds, within the ``budget``."""
    layout, limit = request.options.layout, memory_limit_of(request)
    if layout is None or error.needed_bytes is None:
        return error
    fitting = list(_fitting(request, layout, predict, budget))
    reason, marker, others = str(error).partition(ADVICE)
    if fitting:
        advice = f"A single change that fits: {'; '.join(fitting)}."
    else:  # What is listed are other options, a batch or devices.
        advice = f"No change of one field that was tried fits.{marker}{others}"
    return InfeasibleError(
        f"{words_of(layout)}: the smallest plan that was found needs {error.needed_bytes} bytes per device, "
        f"{error.needed_bytes - limit} ({size(error.needed_bytes - limit)}) more than the limit of {limit}. "
        f"{advice}{budget.remark if budget.remark not in advice else ''}\n{reason}"
    ).needing(error.needed_bytes)


def _fitting(request: PlanRequest, layout: Layout, predict: Predict, budget: AdviceBudget) -> Iterator[str]:
    """The changes that fit. If weights, gradients and state are too many for all devices, none does."""
    named = 0
    for text, changed in () if never_fits(request) else _changes(layout):
        if not budget.allows(text):
            continue
        with suppress(InfeasibleError, OptionsError):
            given = request.options
            options = replace(given, layout=changed, time_limit=min(given.solver_seconds, TRIAL_SECONDS))
            predicted = predict(replace(request, options=options))
            yield f"{text} ({size(predicted.peak_bytes)}, {duration(predicted.step_seconds)} a step)"
            named += 1
        if named == NAMED:
            return


def _changes(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Layouts that differ in one given field, those that cost least first; then those that leave one field out."""
    given = {name: getattr(layout, name) for name in layout.given}

    def changed(**values: Any) -> Layout:
        return Layout(**{**given, **values})

    if given.get("recompute") in ("none", "selective"):
        yield 'recompute="full"', changed(recompute="full")
    if given.get("zero") in (0, 1, 2):
        yield "zero=3", changed(zero=3)
    if given.get("microbatch", 1) > 1:
        half = given["microbatch"] // 2
        yield f"microbatch={half}", changed(microbatch=half)
    if given.get("sequence_parallel") is False:
        yield "sequence_parallel=True", changed(sequence_parallel=True)
    for name in ("microbatch", "data", "pipeline", "tensor", "context", "expert", "schedule", "interleave"):
        if name in given:
            kept = {field: value for field, value in given.items() if field != name}
            with suppress(OptionsError):
                yield f"{name} left out", Layout(**kept)
