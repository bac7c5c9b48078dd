"""Of pipelines that take much longer than the best plan one schedule is priced."""

from __future__ import annotations

import math
from functools import partial

import pytest

from autopar.planner.timings import Timings
from autopar.search import fitting_schedules
from autopar.search.attempts import attempts
from autopar.search.pipelines import _Pipeline, whole_step
from autopar.search.schedules.schedule_estimates import Estimates
from tests.helpers.models import gpt2
from tests.helpers.planning import requested


def test_a_second_schedule_is_priced_only_where_it_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    priced, price = list[float](), fitting_schedules.cut_and_price

    def counted(*args: object) -> fitting_schedules.PipelineSolution:
        found = price(*args)  # type: ignore[arg-type]
        priced.append(found.seconds)
        return found

    monkeypatch.setattr(fitting_schedules, "cut_and_price", counted)
    # Else a second schedule is left out whose estimate alone is above the first one's seconds.
    monkeypatch.setattr(Estimates, "is_below", lambda *given: True)
    request = requested(partial(gpt2, 4), (2,), stages=2, microbatches=4)
    graph = whole_step(request)
    ((layout, _),) = attempts(request, graph, math.inf, lacks_memory=False)
    counts = []
    for best in (math.inf, 1e-9):
        priced.clear()
        solved = _Pipeline(request, {}, graph, layout, 4).solved(Timings(), best)
        assert solved.seconds <= priced[0]
        counts.append(len(priced))
    assert counts == [2, 1]
