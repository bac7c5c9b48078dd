"""The search where layouts are proposed: the most promising is solved, then plans without stages, and then what quick
prices leave open to be quicker than both.

Plans without stages come first if, with as much memory as they take, they are quicker than any layout by its quick
price, and if with the memory there is they take no longer than the quickest of these prices. Then only layouts are
proposed that could be quicker than the plan that is found: often none, which few programs show."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, OptionsError
from autopar.layout import Layout
from autopar.options import without_stages
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.request import NEAR, PlanRequest, Proposals
from autopar.planner.step_graphs import pipelined_step_of
from autopar.planner.timings import Timings
from autopar.restriction import words_of

from .candidate import RULE, STAGES, Excluded, Tried, keep_shown
from .division_bounds import bounds_of, division_of

# The shares of counted work that are left for plans without stages, and then for further pipelines. Chosen.
FOR_NO_STAGES, FOR_OTHERS = 0.5, 0.25
# How many times the least seconds of plans without stages all layouts take by their quick prices where the former come
# first, and how many times those of the plan found where layouts are left out.
# Chosen: as much above the best as a layout is solved at all; of Llama 3 405B, quick prices are 6.2% too high.
AHEAD = NEAR
Solve = Callable[[PlanRequest], Tried]


def tried_proposals(
    request: PlanRequest,
    propose: Callable[[float], Proposals],
    timings: Timings,
    solve: Solve,
    worth: Callable[[Tried], float],
    least: Callable[[], Least],
) -> Tried:
    """What ``solve`` finds for proposed layouts and without stages; no candidates if neither has any.

    Args:
        propose: the layouts that take at most so many seconds, by quick prices.
        worth: seconds of a plan without stages that would not be chosen instead of what was tried.
        least: what plans without stages take at least.
    """
    # Seconds that a user limits cannot be had back: what is quickest on most clusters has them first.
    is_limited = request.options.time_limit is not None
    without = Least() if is_limited else least()
    proposals = propose(AHEAD * without.seconds if without.seconds > 0.0 else math.inf)
    search = ProposedSearch(request, proposals, timings, solve, without)
    is_first = search.solve_ahead(propose)
    if search.proposals.slow is not None:
        search.proposals = propose(AHEAD * search.tried.least)
        search.exclude_slow()
    search.solve_first()
    if not search.tried.candidates:
        return search.tried
    if not is_limited and not is_first:
        search.solve_without_stages(worth(search.tried))
    search.solve_others()
    search.solve_other_microbatches()
    search.solve_rule_of_thumb()
    if is_limited:
        search.solve_without_stages(worth(search.tried))
    return search.tried


@dataclass(frozen=True)
class Least:
    """What plans without stages take at least, in ``seconds``; 0 if that is not known. ``excluded``: says so."""

    seconds: float = 0.0
    excluded: Callable[[], Tried] = Tried


def _just(tried: Tried) -> Callable[[], Tried]:
    return lambda: tried


@dataclass
class ProposedSearch:
    """What was ``tried`` so far, and how each layout that was ``solved`` did. ``least``: of plans without stages."""

    request: PlanRequest
    proposals: Proposals
    timings: Timings
    solve: Solve
    least: Least = field(default_factory=Least)
    tried: Tried = field(default_factory=Tried)
    solved: dict[Layout, Tried] = field(default_factory=dict)

    def exclude_slow(self) -> None:
        """Says what the quickest takes of the layouts that are left out because plans without stages are quicker."""
        slow = self.proposals.slow
        if slow is not None:
            error = TooSlowError(words_of(slow), self.proposals.slow_seconds, is_proven=False, is_least=True)
            self.tried += Tried(excluded=(Excluded(STAGES, error, layout=str(slow)),))

    def solve_ahead(self, propose: Callable[[float], Proposals]) -> bool:
        """Solves plans without stages before layouts while all of these are left out, and tells whether it found one.
        None is sought once those that fit are known to take longer than the quickest layout: how long they take at
        least then decides anew what is left out. Where none that quick fits, all layouts come first."""
        while self.proposals.slow is not None and not self.proposals.layouts:
            self.solve_without_stages(self.proposals.slow_seconds)
            if self.tried.candidates:
                return True
            tried, self.tried = self.tried, Tried()
            slow_ones = (each.error.seconds for each in tried.excluded if isinstance(each.error, TooSlowError))
            seconds = min(slow_ones, default=0.0)
            is_known = seconds > self.least.seconds
            self.least = Least(seconds, _just(tried)) if is_known else self.least
            self.proposals = propose(AHEAD * seconds if is_known else math.inf)
        return False

    def solve_first(self) -> None:
        """Solves layouts until one has a plan."""
        for layout in self.proposals.layouts:
            if self._restricted(layout).candidates:
                return

    def solve_without_stages(self, worth: float) -> None:
        options = self.request.options
        if self.least.seconds >= worth:
            self.tried += self.least.excluded()
            return
        self.timings.reserve(options, FOR_NO_STAGES)
        self.tried += self.solve(replace(self.request, options=without_stages(options), worth=worth))
        self.timings.reserve(options, FOR_OTHERS)

    def solve_others(self) -> None:
        for layout in self.proposals.layouts:
            if layout not in self.solved and self._may_win(layout) and not self._is_spent:
                self._restricted(layout)

    def solve_other_microbatches(self) -> None:
        """Tries larger and smaller microbatches of the quickest layout: as long as these are quicker, and their bound
        and their quick price say that they could be."""
        if not self.solved:
            return
        layout = min(self.solved, key=lambda layout: self.solved[layout].least)
        for factor in (2.0, 0.5):
            seconds, size = self.tried.least, layout.microbatch * factor
            while size.is_integer() and self.request.batch % (layout.data * size) == 0 and not self._is_spent:
                other = replace(layout, microbatch=int(size))
                if not self._may_win(other) or self._bound(other) >= seconds:
                    break
                found = self._restricted(other)
                if found.least >= seconds:
                    break
                seconds, size = found.least, size * factor

    def solve_rule_of_thumb(self) -> None:
        """Finds what the layout of the rule of thumb takes. One that cannot be the quickest is not solved: its quick
        price says so."""
        rule = self.proposals.rule
        if rule is None or (rule not in self.solved and self._is_spent):
            return
        if rule not in self.solved and not self._may_win(rule):
            slow = TooSlowError(words_of(rule), self.proposals.quick[rule], is_proven=False)
            self.tried += Tried(excluded=(Excluded(RULE, slow, layout=str(rule)),))
            return
        found = self.solved.get(rule) or self._restricted(rule)
        best = min(found.candidates, key=lambda candidate: candidate.seconds, default=None)
        errors = [failure.error for failure in found.failures if isinstance(failure.error, InfeasibleError)]
        excluded = tuple(Excluded(RULE, error, layout=str(rule)) for error in errors)
        self.tried += Tried(excluded=excluded, rule=best)

    def _restricted(self, layout: Layout) -> Tried:
        """What a layout has."""
        options, found = replace(self.request.options, layout=layout), Tried()
        with suppress(OptionsError):
            found = self.solve(replace(self.request, options=options, worth=self.tried.least))
        self.solved[layout] = found
        self.tried += found
        keep_shown(self.tried)
        return found

    def _may_win(self, layout: Layout) -> bool:
        """Whether quick prices leave open that a layout is quicker than all that was tried."""
        if not self.tried.candidates:
            return True
        return self.proposals.is_near(layout) and self.proposals.may_take(self.tried.least, layout)

    def _bound(self, layout: Layout) -> float:
        return bounds_of(self.request, pipelined_step_of(self.request)).seconds(division_of(layout, self.request.batch))

    @property
    def _is_spent(self) -> bool:
        return self.timings.is_spent(self.request.options) and math.isfinite(self.tried.least)
