"""The error for a layout that does not fit: by how many bytes, and which single change of it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.plan_record import Predicted
from autopar.planner.memory_advice import AdviceBudget
from autopar.planner.request import UNLIMITED, PlanRequest, memory_limit_of
from autopar.plans.views.quantities import duration, size
from autopar.restriction import words_of

from .changes import Change, changes
from .never_fits import never_fits, resting

# Changes that fit and are named, and how many are tried if one of them fits. Chosen: a first one may be impossible for
# reasons that only the user knows, and each takes about as long as a plan.
NAMED = TRIED = 2
# Searches that are left for the bytes that the layout needs, where these are not known. Chosen: one within somewhat
# more than a stage needs, or one without a limit.
FOR_BYTES = 2
# A limit within which a whole plan is looked for, relative to what its first stage to fail needs. Chosen: stages are
# not all as full.
FULLER = 1.2
# Counted seconds of the solvers for a change. Chosen: a fit is looked for, and not the best plan.
TRIAL_SECONDS = 10.0

# What the quickest plan for a request is predicted to take. Raises InfeasibleError or OptionsError if there is none.
Predict = Callable[[PlanRequest], Predicted]


def layout_infeasible(
    request: PlanRequest, error: InfeasibleError, is_exact: bool, predict: Predict, budget: AdviceBudget
) -> InfeasibleError:
    """``error`` with the bytes by which the layout of ``request`` is too big, and the single changes of it that were
    found to fit. ``is_exact``: whether the bytes that ``error`` needs are those of a whole plan, and not of a stage
    alone. ``predict`` plans each change, so that the advice holds, within the ``budget``."""
    is_known = is_exact and error.needed_bytes is not None
    trials, words = _Trials(request, predict, budget, 0 if is_known else FOR_BYTES), words_of(request.options.layout)
    advice, limit = trials.sentences(), memory_limit_of(request)
    needed = error.needed_bytes if is_known else trials.needed(error.needed_bytes)
    if needed is None or needed <= limit:  # Less is found only where the search within the limit ended early.
        return InfeasibleError(f"{words}: {error}.{advice}{budget.remark}")
    return InfeasibleError(
        f"{words}: the smallest plan that was found needs {needed} bytes per device, {needed - limit} "
        f"({size(needed - limit)}) more than the limit of {limit}.{advice}{budget.remark}"
    ).needing(needed)


@dataclass
class _Trials:
    """What is tried in place of the layout of ``request``, within a ``budget``, of which some searches are
    ``reserved``. ``failed``: changes that do not fit."""

    request: PlanRequest
    predict: Predict
    budget: AdviceBudget
    reserved: int
    failed: list[str] = field(default_factory=list)

    def sentences(self) -> str:
        """What fits, after a space, or what was tried in vain."""
        if never_fits(self.request):
            return f" No layout fits on these devices: {self._rests()}."
        fitting = list(self._fitting())
        if fitting:
            return f" A single change that fits: {'; '.join(fitting)}."
        tried = f" that was tried fits ({', '.join(self.failed)})" if self.failed else " is known to fit"
        return f" No single change of it{tried}."

    def _rests(self) -> str:
        request = self.request
        total, limit = sum(resting(request).values()), memory_limit_of(request)
        devices = math.prod(request.mesh)
        return (
            f"divided evenly among all {devices}, weights, gradients and optimizer state alone take "
            f"{size(total / devices)} on each; take {math.floor(total / limit) + 1} devices or more, an optimizer with "
            "less state, or offload"
        )

    def _fitting(self) -> Iterator[str]:
        """The changes that fit. Those that hardly can are tried if no other one does."""
        layout, named = self.request.options.layout, 0
        for tried, change in enumerate(() if layout is None else changes(self.request, layout)):
            if named == NAMED or (named and (tried >= TRIED or not change.may_fit)):
                return
            if self.budget.searches <= self.reserved:
                self.budget.skipped.append(change.text)
            if self.budget.searches <= self.reserved or not self.budget.allows(change.text):
                continue
            predicted = self._predicted(change)
            if predicted is None:
                self.failed.append(change.text)
                continue
            yield f"{change.text} ({size(predicted.peak_bytes)}, {duration(predicted.step_seconds)} a step)"
            named += 1

    def _predicted(self, change: Change) -> Predicted | None:
        changed = change.of(self.request)
        seconds = min(changed.options.solver_seconds, TRIAL_SECONDS)
        return self._possible(replace(changed, options=replace(changed.options, time_limit=seconds)))

    def _possible(self, request: PlanRequest) -> Predicted | None:
        with suppress(InfeasibleError, OptionsError):
            return self.predict(request)
        return None

    def needed(self, stage: int | None) -> int | None:
        """Bytes of the fullest device of a plan of the layout, of which the first stage to fail needs so many."""
        for limit in (UNLIMITED,) if stage is None else (math.ceil(FULLER * stage), UNLIMITED):
            if self.budget.allows("the bytes that it needs"):
                found = self._possible(replace(self.request, memory_limit=limit))
                if found is not None:
                    return found.peak_bytes
        return None
