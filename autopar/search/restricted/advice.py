"""The error for a layout that does not fit: by how many bytes, and which single change of it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, OptionsError
from autopar.field_text import in_sentence
from autopar.ir.plan_record import PlanRecord
from autopar.planner.memory_advice import ADVICE, FULLER, LESS_STATE, AdviceBudget
from autopar.planner.request import UNLIMITED, PlanRequest, memory_limit_of
from autopar.plans.views.quantities import duration, size
from autopar.restriction import words_of

from .changes import ROOMY, Change, changes
from .never_fits import never_fits, resting

# Changes that fit and are named, and how many are tried if one of them fits. Chosen: a first one may be impossible for
# reasons that only the user knows, and each takes about as long as a plan.
NAMED = TRIED = 2
# How many are tried in vain that leave little room. Chosen: few of them fit, and of a small model each takes 8 s.
HARDLY = 2
# Searches that are left for the bytes that the layout needs, where these are not known. Chosen: one within somewhat
# more than a stage needs, or one without a limit.
FOR_BYTES = 2
# Counted seconds of the solvers for a change. Chosen: a fit is looked for, and not the best plan.
TRIAL_SECONDS = 10.0
WORDS: Mapping[str, str] = {"weights": "weights", "gradients": "gradients", "state": "optimizer state"}

# The quickest plan for a request. Raises InfeasibleError or OptionsError if there is none.
Plans = Callable[[PlanRequest], PlanRecord]


def layout_infeasible(
    request: PlanRequest,
    error: InfeasibleError,
    explain: Callable[[], Exception] | None,
    plans: Plans,
    budget: AdviceBudget,
) -> InfeasibleError:
    """``error`` with the bytes by which the layout of ``request`` is too big, and the single changes of it that were
    found to fit. ``explain``: says what would fit of pipelines, where ``error`` is of a stage alone. ``plans`` plans
    each change, so that the advice holds, within the ``budget``."""
    is_known = explain is None and error.needed_bytes is not None
    trials, words = _Trials(request, plans, budget, 0 if is_known else FOR_BYTES), words_of(request.options.layout)
    fitting, limit = trials.sentences(), memory_limit_of(request)
    needed = error.needed_bytes if is_known else trials.needed(error.needed_bytes)
    if needed is None or needed <= limit:  # Devices have limits of their own, or the search within it ended early.
        said = error if explain is None else explain()
        reason, needed = f" {str(said).rstrip('.')}", getattr(said, "needed_bytes", None)
    else:
        reason = (
            f" the smallest plan that was found needs {needed} bytes per device, {needed - limit} "
            f"({size(needed - limit)}) more than the limit of {limit}"
        )
    _, _, others = str(error).partition(ADVICE)
    others = f" What else would lower it: {others}" if others and not trials.found and is_known else ""
    remark = budget.remark if budget.remark not in others else ""
    return InfeasibleError(f"{words}:{reason}.{fitting}{others}{remark}").needing(needed)


@dataclass
class _Trials:
    """What is tried in place of the layout of ``request``, within a ``budget``, of which some searches are
    ``reserved``. ``failed``: changes that do not fit; ``found``: those that do, with what they take."""

    request: PlanRequest
    plans: Plans
    budget: AdviceBudget
    reserved: int
    failed: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    def sentences(self) -> str:
        """What fits, after a space, or what was tried in vain."""
        if never_fits(self.request):
            return f" No layout fits on these devices: {_resting(self.request)}."
        self.found += self._fitting()
        if self.found:
            return f" A single change that fits: {'; '.join(self.found)}."
        tried = f" that was tried fits ({', '.join(self.failed)})" if self.failed else " is known to fit"
        return f" No single change of it{tried}."

    def _fitting(self) -> Iterator[str]:
        """The changes that fit, of those of which what rests on a device does."""
        layout, named = self.request.options.layout, 0
        possible = [] if layout is None else [each for each in changes(self.request, layout) if each.may_fit]
        for tried, change in enumerate(possible):
            is_enough = named == NAMED or (named and tried >= TRIED)
            if is_enough or (change.filled > ROOMY and len(self.failed) >= HARDLY):
                return
            if not self.budget.allows(change.text, self.reserved):
                continue
            plan = self._planned(change)
            if plan is None:
                self.failed.append(change.text)
                continue
            takes = f"{size(plan.predicted.peak_bytes)}, {duration(plan.predicted.step_seconds)} a step"
            # Of what the layout leaves open, that on which most of a search depends.
            found = "" if "pipeline" in change.layout.given else f", with pipeline={plan.stages}"
            yield f"{change.text} ({takes}{found})"
            named += 1

    def _planned(self, change: Change) -> PlanRecord | None:
        changed = change.of(self.request)
        seconds = min(changed.options.solver_seconds, TRIAL_SECONDS)
        return self._possible(replace(changed, options=replace(changed.options, time_limit=seconds)))

    def _possible(self, request: PlanRequest) -> PlanRecord | None:
        with suppress(InfeasibleError, OptionsError):
            return self.plans(request)
        return None

    def needed(self, stage: int | None) -> int | None:
        """Bytes of the fullest device of a plan of the layout, of which the first stage to fail needs so many."""
        for limit in (UNLIMITED,) if stage is None else (math.ceil(FULLER * stage), UNLIMITED):
            if self.budget.allows("the bytes that it needs"):
                found = self._possible(replace(self.request, memory_limit=limit))
                if found is not None:
                    return found.predicted.peak_bytes
        return None


def _resting(request: PlanRequest) -> str:
    """What rests beyond the limit on each device, and what would be less."""
    of, limit, devices = resting(request), memory_limit_of(request), math.prod(request.mesh)
    total, kinds = sum(of.values()), [WORDS[kind] for kind, count in of.items() if count]
    shared = f"divided evenly among all {devices}, " if devices > 1 else ""
    less = [f"take {math.floor(total / limit) + 1} devices or more"]
    less += [LESS_STATE] if of["state"] else []
    less += ["offload=None or True"] if request.options.offload is False else []
    each = f"{shared}{in_sentence(kinds)} alone take {size(total / devices)} on each"
    return f"{each}; for these to fit, {' or '.join(less)}"
