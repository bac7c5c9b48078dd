"""Ranks the divisions of a mixture of experts, whose data ranks divide the experts: every division has a program of its
own, with its data ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.graph import Graph
from autopar.planner.roles.expert_blocks import expert_blocks
from autopar.search.chunks import WirePrice
from autopar.search.division_bounds import Bounds, Division, bounds_of
from autopar.search.pipelines import whole_step

from .closed_form import ClosedForms
from .ranking import Degrees, Ranking
from .stage_costs import PlacedStage

# How many programs are solved. Chosen: each takes a second or two, and the search for a plan solves the best in full.
MOST_PROGRAMS = 3


def has_experts(graph: Graph) -> bool:
    """Whether a graph has blocks of experts."""
    return bool(expert_blocks(graph))


@dataclass
class MixtureRanking(Ranking):
    """A ranking by the bounds of divisions (:mod:`autopar.search.division_bounds`), and by the programs of those that
    these put first."""

    _solved: dict[Degrees, tuple[PlacedStage, ...]] = field(default_factory=dict)

    def bound(self, division: Degrees) -> float:
        """What a division takes, by the ratio of estimates to bounds where it is not estimated itself."""
        if division in self.estimated:
            return self.known[division]
        ratios = [self.known[each] / self._alone(each) for each in self.estimated if math.isfinite(self.known[each])]
        return self._alone(division) * min(ratios, default=1.0)

    def _alone(self, division: Degrees) -> float:
        count, stages = self._microbatches(division), division.pipeline
        least = self._bounds.seconds(Division(stages, division.data, division.tensor, count, 1))
        return least * (1.0 + (stages - 1) / (6.0 * count))

    def _placed(self, division: Degrees) -> tuple[PlacedStage, ...]:
        if division not in self._solved:
            placed = self.programs.placed_on(division.layout)
            self._solved[division] = () if placed is None else (placed,)
        return self._solved[division]

    def _together(self, division: Degrees) -> float:
        if division not in self._solved and len(self._solved) >= MOST_PROGRAMS:
            return math.inf
        placed = self._placed(division)
        return min((self._closed(each.totals(division.data), division) for each in placed), default=math.inf)

    @cached_property
    def _bounds(self) -> Bounds:
        return bounds_of(self.request, whole_step(self.request))

    @cached_property
    def forms(self) -> ClosedForms:
        placed = next(each for found in self._solved.values() for each in found)
        return ClosedForms(placed.costs(1).over(WirePrice(0.0, math.inf)).segments)
