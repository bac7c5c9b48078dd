"""Of pipelines that take much longer than the best plan one schedule is priced, and none is made to fit."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from autopar.planner import solve_mesh
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.step_graphs import pipelined_step_of
from autopar.planner.timings import Timings
from autopar.search import fitting_schedules
from autopar.search.attempts import attempts
from autopar.search.candidate import Candidate
from autopar.search.pipelines import _Pipeline, with_stages
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
    graph = pipelined_step_of(request)
    ((layout, _),) = attempts(request, graph, math.inf, lacks_memory=False)
    counts = []
    for best in (math.inf, 1e-9):
        priced.clear()
        solved = _Pipeline(request, {}, graph, layout, 4).solved(Timings(), best)
        assert solved.seconds <= priced[0]
        counts.append(len(priced))
    assert counts == [2, 1]


def test_pipelines_are_made_to_fit_only_where_they_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as long as with memory to spare, or longer."""
    limited, solve = list[object](), solve_mesh._solve_limited

    def counted(*args: object) -> object:
        limited.append(args)
        return solve(*args)  # type: ignore[arg-type]

    options = {"stages": 2, "microbatches": 4}
    request = requested(partial(gpt2, 4), (2,), **options)
    graph = pipelined_step_of(request)
    ((layout, _),) = attempts(request, graph, math.inf, lacks_memory=False)
    free = _Pipeline(request, {}, graph, layout, 4).solved(Timings())
    limit = int(0.8 * free.figures()[1].peak_bytes)
    tight = requested(partial(gpt2, 4), (2,), memory_limit=limit, **options)
    monkeypatch.setattr(solve_mesh, "_solve_limited", counted)
    with pytest.raises(TooSlowError):
        _Pipeline(tight, {}, pipelined_step_of(tight), layout, 4).solved(Timings(), 0.9 * free.seconds)
    assert not limited
    found = _Pipeline(tight, {}, pipelined_step_of(tight), layout, 4).solved(Timings(), 2.0 * free.seconds)
    assert limited and found.seconds >= free.seconds
    assert found.figures()[1].peak_bytes <= limit


def test_pipelines_that_are_expected_to_lose_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, solve = set[str](), _Pipeline.solved

    def noted(sought: _Pipeline, *args: Any) -> Candidate:
        try:
            return solve(sought, *args)
        except TooSlowError:
            given_up.add(sought.layout.described)
            raise

    open_to_all = {"mesh_search": True, "stages": None, "microbatches": None}
    free = requested(partial(gpt2, 4), (2,), **open_to_all)
    quickest = with_stages(free, {}, Timings(), math.inf, lacks_memory=False).candidates[0]
    limit = int(0.7 * quickest.figures()[1].peak_bytes)
    tight = requested(partial(gpt2, 4), (2,), memory_limit=limit, **open_to_all)
    monkeypatch.setattr(_Pipeline, "solved", noted)
    found = with_stages(tight, {}, Timings(), 0.95 * quickest.seconds, lacks_memory=True)
    assert given_up and not found.candidates
    listed = [each.name for each in found.tried.excluded]
    for layout in given_up:
        assert any(name.startswith(layout) for name in listed), layout
