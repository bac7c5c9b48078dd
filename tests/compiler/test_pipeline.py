"""Programs of pipeline ranks: a schedule that is not proven to run is refused when they are compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ScheduleError
from autopar.ir.graph import Graph
from tests.helpers.pipelines import Made, Wanted, make_pipeline
from tests.passes.test_cut import SKIP


def _made() -> Made:
    return make_pipeline(Graph.from_text(SKIP), Wanted((2, 1), "1f1b", 2, anywhere=True))


def _swapped(made: Made, rank: int) -> Made:
    """``made`` with the first two actions of ``rank`` exchanged."""
    first, second, *rest = made.schedule.ranks[rank]
    ranks = tuple((second, first, *rest) if at == rank else listed for at, listed in enumerate(made.schedule.ranks))
    return replace(made, schedule=replace(made.schedule, ranks=ranks))


def test_a_schedule_that_runs_is_compiled() -> None:
    made = _made()
    assert made.program(0).schedule == made.schedule


@pytest.mark.parametrize("rank", [0, 1])
def test_a_schedule_whose_ranks_disagree_is_refused_by_each(rank: int) -> None:
    made = _swapped(_made(), 1)
    with pytest.raises(ScheduleError, match="both must keep one order"):
        made.program(made.meshes.ranks(rank).start)
