"""The search where layouts are proposed: the most promising is solved, then plans without stages, and then what quick
prices leave open to be quicker than both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from autopar.errors import InfeasibleError, OptionsError
from autopar.layout import Layout
from autopar.options import without_stages
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.request import NEAR, PlanRequest, Proposals
from autopar.planner.timings import Timings
from autopar.restriction import words_of

from .candidate import RULE, Excluded, Tried, keep_shown
from .division_bounds import Division, bounds_of
from .pipelines import whole_step

Solve = Callable[[PlanRequest], Tried]


def tried_proposals(
    request: PlanRequest, proposals: Proposals, timings: Timings, solve: Solve, worth: Callable[[Tried], float]
) -> Tried:
    """What ``solve`` finds for the layouts of ``proposals`` and without stages; no candidates if none of the layouts
    has any. ``worth``: seconds of a plan without stages that would not be chosen instead of what was tried."""

    def restricted(layout: Layout) -> Tried:
        own = replace(request, options=replace(request.options, layout=layout), worth=tried.least)
        with suppress(OptionsError):
            return solve(own)
        return Tried()

    tried, solved = Tried(), dict[Layout, Tried]()
    for layout in proposals.layouts:
        known = next((each for each in solved if solved[each].candidates), None)
        if known is not None and timings.is_spent(request.options):
            break
        if known is None or proposals.may_take(tried.least, layout, known, solved[known].least):
            solved[layout] = restricted(layout)
            tried += solved[layout]
            keep_shown(tried)
        if known is None and solved[layout].candidates:
            timings.reserve(request.options, 0.5)
            tried += solve(replace(request, options=without_stages(request.options), worth=worth(tried)))
    if tried.candidates and not timings.is_spent(request.options):
        quickest = min(solved, key=lambda layout: solved[layout].least)
        if solved[quickest].least <= NEAR * tried.least:
            tried += _other_microbatches(request, proposals, quickest, solved[quickest].least, restricted)
        tried += _rule_of_thumb(proposals, solved, restricted)
    return tried


def _rule_of_thumb(proposals: Proposals, solved: Mapping[Layout, Tried], solve: Callable[[Layout], Tried]) -> Tried:
    """What the layout of the rule of thumb takes; ``solved``: what other layouts do. One that is far from the quickest
    is not solved: its quick price says so."""
    rule = proposals.rule
    if rule is None:
        return Tried()
    if rule not in solved and not proposals.is_near(rule):
        slow = TooSlowError(words_of(rule), proposals.quick[rule], is_proven=False)
        return Tried(excluded=(Excluded(RULE, slow),))
    found = solved.get(rule) or solve(rule)
    best = min(found.candidates, key=lambda candidate: candidate.seconds, default=None)
    errors = [failure.error for failure in found.failures if isinstance(failure.error, InfeasibleError)]
    return Tried(
        candidates=() if rule in solved else found.candidates,
        excluded=tuple(Excluded(RULE, error) for error in errors),
        rule=best,
    )


def _other_microbatches(
    request: PlanRequest, proposals: Proposals, layout: Layout, best: float, solve: Callable[[Layout], Tried]
) -> Tried:
    """Candidates like those of ``layout``, which takes ``best`` seconds, with larger and smaller microbatches: as long
    as these are quicker, and their bound and their quick price say that they could be."""
    tried = Tried()
    for factor in (2.0, 0.5):
        seconds, size = best, layout.microbatch * factor
        while size.is_integer() and request.batch % (layout.data * size) == 0:
            count = request.batch // (layout.data * int(size))
            division = Division(layout.pipeline, layout.data, layout.tensor, count, 1)
            other = replace(layout, microbatch=int(size))
            if not proposals.is_near(other) or bounds_of(request, whole_step(request)).seconds(division) >= seconds:
                break
            found = solve(other)
            tried += found
            if found.least >= seconds:
                break
            seconds, size = found.least, size * factor
    return tried
