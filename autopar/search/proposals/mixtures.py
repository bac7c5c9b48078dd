"""Ranks the divisions of a mixture of experts, whose data ranks divide the experts: every division has a program of its
own, with its data ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from autopar.layout import Layout
from autopar.planner.step_graphs import pipelined_step_of
from autopar.search.division_bounds import bounds_of, division_of

from .closed_form import ClosedForms
from .ranking import Ranking
from .stage_costs import PlacedStage

# How many programs are solved. Chosen: each takes a second or two, and the search for a plan solves the best in full.
MOST_PROGRAMS = 3


@dataclass
class MixtureRanking(Ranking):
    """A ranking by the bounds of divisions (:mod:`autopar.search.division_bounds`), and by the programs of those that
    these put first."""

    _solved: dict[Layout, tuple[PlacedStage, ...]] = field(default_factory=dict)

    def bound(self, layout: Layout) -> float:
        """What a division takes, by the ratio of estimates to bounds where it is not estimated itself."""
        if layout in self.estimated:
            return self.estimated[layout]
        ratios = [s / self._alone(each) for each, s in self.estimated.items() if math.isfinite(s)]
        return self._alone(layout) * min(ratios, default=1.0)

    def _alone(self, layout: Layout) -> float:
        request, batch = self.request, self.request.batch
        least = bounds_of(request, pipelined_step_of(request)).seconds(division_of(layout, batch))
        return least * (1.0 + (layout.pipeline - 1) / (6.0 * layout.microbatches(batch)))

    def _placed(self, layout: Layout) -> tuple[PlacedStage, ...]:
        if layout not in self._solved:
            self._solved[layout] = self.programs.placed_on(layout)
        return self._solved[layout]

    def _together(self, layout: Layout) -> float:
        # Those of the rule of thumb that cannot be placed took no time.
        solved = sum(bool(found) for found in self._solved.values())
        is_left_out = layout not in self._solved and solved >= MOST_PROGRAMS
        return math.inf if is_left_out else super()._together(layout)

    @cached_property
    def forms(self) -> ClosedForms:
        return ClosedForms.of(next(each for found in self._solved.values() for each in found).costs(1))
