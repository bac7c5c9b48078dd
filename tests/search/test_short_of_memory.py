"""Near a limit of memory: what fits is found, microbatches are tried without stages, and words say what holds."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import InfeasibleError, Options
from autopar.planner import solve_mesh as solve_mesh_module
from autopar.planner.memory_limit import ShortOfMemoryError, TooSlowError
from autopar.planner.mesh_solution import MeshSolution, peak_bytes
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import pipelined_step_of, step_of
from autopar.planner.timings import Timings
from autopar.search import best_plan as best_plan_module
from autopar.search import pipelines as pipelines_module
from autopar.search.attempts import attempts
from autopar.search.best_plan import AHEAD
from autopar.search.candidate import NO_STAGES, Candidate, Failure, Staged, Tried, why_excluded
from autopar.search.pipelines import _Pipeline, with_stages
from autopar.search.stage_meshes import layout_of
from autopar.search.without_stages import why_too_large
from tests.helpers.planning import CLUSTER, requested

LIMIT = 150_000


class Perceptron(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        hidden = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.l = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.l(x)
        return y.pow(2).mean()


def plan(**options: object) -> autopar.Plan:
    settings = Options(**options)  # type: ignore[arg-type]
    return autopar.plan(Perceptron(), (2, 2), (torch.randn(64, 128),), cluster=CLUSTER, options=settings)


def test_steps_that_hold_less_than_what_counts_least_are_found() -> None:
    """The step of which the program counts least holds 172,560 bytes."""
    found = plan(memory_limit=LIMIT, stages=1, microbatches=1)
    assert found.predicted.peak_bytes <= LIMIT


@pytest.mark.slow
def test_an_error_names_a_limit_that_is_enough() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(memory_limit=66_000, stages=1, microbatches=1)
    message = str(caught.value)
    named = re.search(r"Options\(memory_limit=(\d+)\)", message)
    assert named is not None and 66_000 < int(named[1]) < LIMIT
    assert "less state" not in message, "all of it rests in host memory"
    assert plan(memory_limit=int(named[1]), stages=1, microbatches=1).predicted.peak_bytes <= int(named[1])


@pytest.mark.parametrize("lacks_memory", [False, True])
def test_microbatches_are_tried_without_stages_where_memory_is_short(lacks_memory: bool) -> None:
    request = requested("stack", (2,), mesh_search=True, stages=None, microbatches=None)
    tried = list(attempts(request, pipelined_step_of(request), 1.0, lacks_memory))
    whole = [counts for layout, counts in tried if layout.stages == 1]
    assert bool(whole) == lacks_memory
    assert all(count > 1 for counts in whole for count in counts)


def test_a_step_in_microbatches_leaves_work_for_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much work it takes to solve: every program takes half of what is left."""
    tried, timings = list[int](), Timings()

    def solved(own: _Pipeline, timings: Timings, best: float) -> Candidate:
        tried.append(own.layout.stages)
        for _ in range(2):  # Placements, and those that hold less.
            timings.solving += 0.5 * timings.left(own.request.options)
        return Candidate(1.0 / len(tried), own.layout, _never, _never)

    monkeypatch.setattr(_Pipeline, "solved", solved)
    request = requested("stack", (2, 2), mesh_search=True, stages=None, microbatches=None)
    with_stages(request, {}, timings, math.inf, lacks_memory=True)
    assert set(tried) == {1, 2, 4}


@pytest.mark.parametrize(
    ("best", "limit", "is_first"), [(math.inf, None, False), (1.0, None, True), (math.inf, 9, True)]
)
def test_stages_come_before_a_whole_step_in_microbatches_where_nothing_fits(
    best: float, limit: float | None, is_first: bool
) -> None:
    """But within a time limit, of which they might take all."""
    request = replace(_open(), options=replace(_open().options, time_limit=limit))
    tried = [layout.stages for layout, _ in attempts(request, pipelined_step_of(request), best, lacks_memory=True)]
    assert {1, 2, 4} <= set(tried) and (tried[0] == 1) == is_first and (tried[-1] == 1) != is_first


def test_whole_steps_that_cannot_win_over_what_stages_found_are_not_tried() -> None:
    request, found = _open(), [math.inf]
    every = attempts(request, pipelined_step_of(request), math.inf, lacks_memory=True, found=lambda: found[0])
    assert next(every)[0].stages > 1
    found[0] = 1e-9
    assert all(layout.stages > 1 for layout, _ in every)


@pytest.mark.parametrize("seconds", [None, 1.001, 2.0])
def test_microbatches_are_not_tried_where_saving_memory_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """The quickest placements take 1 s and do not fit. Pipelines come first; then what saves memory takes ``seconds``,
    or nothing fits."""
    asked = list[bool]()

    def staged(*given: Any, lacks_memory: bool = False, is_ahead: bool = False) -> Staged:
        asked.append(given[4] if len(given) > 4 else lacks_memory)
        return Staged(settled={(layout_of((2, 2), (2, 2)), 2): math.inf})

    def whole(*_: Any) -> Tried:
        if seconds is None:
            return Tried(failures=(Failure(InfeasibleError("nothing fits")),))
        return Tried((Candidate(seconds, None, _never, _never, lacks_memory=seconds > 1.01),))

    monkeypatch.setattr(best_plan_module, "with_stages", staged)
    monkeypatch.setattr(best_plan_module, "plans_without_stages", whole)
    short = ShortOfMemoryError("the quickest placements", 1.0, lambda: math.inf)
    monkeypatch.setattr(best_plan_module, "why_too_large", lambda *_: short)
    best_plan_module._of_arrangement(_open(), {}, Timings(), math.inf)
    assert asked == [True, seconds != 1.001]


@pytest.mark.parametrize("stages", [None, 1])
def test_a_step_that_does_not_fit_whole_leaves_work_for_microbatches(
    monkeypatch: pytest.MonkeyPatch, stages: int | None
) -> None:
    left = list[float]()

    def solved(own: _Pipeline, timings: Timings, best: float) -> Candidate:
        left.append(timings.left(own.request.options) / own.request.options.solver_seconds)
        return Candidate(1.0, own.layout, _never, _never)

    monkeypatch.setattr(_Pipeline, "solved", solved)
    request = requested("stack", (2, 2), mesh_search=True, stages=stages, microbatches=None)
    with_stages(request, {}, Timings(solving=request.options.solver_seconds), math.inf, lacks_memory=True)
    assert left[0] >= 0.5


def _open() -> PlanRequest:
    return requested("stack", (2, 2), mesh_search=True, stages=None, microbatches=None)


def _counting_attempts(monkeypatch: pytest.MonkeyPatch, fail: type[Exception] | None = None) -> list[tuple[int, int]]:
    """Every pipeline that is attempted, as stages and microbatches. Each takes 1 s, or fails."""
    tried = list[tuple[int, int]]()

    def solved(own: _Pipeline, timings: Timings, best: float) -> Candidate:
        tried.append((own.layout.stages, own.microbatches))
        if fail is TooSlowError:
            raise TooSlowError("stages", 2.0 * best)
        if fail is not None:
            raise fail("does not fit")
        return Candidate(1.0, own.layout, _never, _never)

    monkeypatch.setattr(_Pipeline, "solved", solved)
    return tried


@pytest.mark.parametrize("fail", [None, InfeasibleError])
def test_what_was_settled_ahead_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, fail: type[Exception]) -> None:
    tried, request = (
        _counting_attempts(monkeypatch, fail),
        requested("stack", (2, 2), mesh_search=True, stages=None, microbatches=None),
    )
    ahead = with_stages(request, {}, Timings(), 10.0, lacks_memory=True, is_ahead=True)
    assert tried and all(stages > 1 for stages, _ in tried), "the whole step comes later"
    found = with_stages(request, {}, Timings(), 20.0, lacks_memory=True, before=ahead)
    assert len(set(tried)) == len(tried) and any(stages == 1 for stages, _ in tried)
    assert (fail is None) == bool(found.tried.candidates)


@pytest.mark.parametrize(("seconds", "times"), [(9.0, 1), (11.0, 2)])
def test_what_was_too_slow_ahead_is_tried_again_for_more_seconds_alone(
    monkeypatch: pytest.MonkeyPatch, seconds: float, times: int
) -> None:
    tried = _counting_attempts(monkeypatch, TooSlowError)
    request = _open()
    ahead = with_stages(request, {}, Timings(), 10.0, lacks_memory=True, is_ahead=True)
    found = with_stages(request, {}, Timings(), seconds, lacks_memory=True, before=ahead)
    assert {tried.count(own) for own in tried if own[0] > 1} == {times}
    assert found.tried.excluded, "it says what was too slow"


def test_where_memory_is_short_more_microbatches_follow_what_does_not_fit() -> None:
    request = _open()
    graph = pipelined_step_of(request)
    free, short = (list(attempts(request, graph, math.inf, lacks, False)) for lacks in (False, True))
    assert all(len(counts) == 1 for _, counts in free)
    assert any(len(counts) > 1 for _, counts in short)
    assert all(list(counts) == sorted(counts) for _, counts in short)
    sizes = [max(layout.sizes) for layout, _ in short]
    assert sizes == sorted(sizes), "the easiest programs come first"


def test_where_time_is_up_the_whole_step_is_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead, nothing of it is: that pipelines failed shows nothing of it."""
    tried = _counting_attempts(monkeypatch, InfeasibleError)
    request = _open()
    request = replace(request, options=replace(request.options, time_limit=1.0))
    ahead = with_stages(request, {}, Timings(), math.inf, lacks_memory=True, is_ahead=True)
    assert tried and ahead.failure is not None
    tried.clear()
    with_stages(request, {}, Timings(solving=1.0), math.inf, lacks_memory=True, before=ahead)
    assert tried == [(1, 2)]


def test_what_lost_to_seconds_that_no_plan_has_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    _counting_attempts(monkeypatch, TooSlowError)  # Each takes twice the seconds asked for.
    ahead = with_stages(_open(), {}, Timings(), 10.0, lacks_memory=True, is_ahead=True)
    assert any(ahead.losing.values())
    monkeypatch.setattr(pipelines_module, "attempts", lambda *_: iter(()))
    for best, is_listed in ((19.0, True), (21.0, False)):
        found = with_stages(_open(), {}, Timings(), best, lacks_memory=True, before=ahead)
        assert bool(found.tried.excluded) == is_listed


def _quickest_and_limited(part: float) -> tuple[MeshSolution, PlanRequest]:
    """The quickest solution without stages, and a request within a ``part`` of what it holds."""
    free = _open()
    quickest, _ = solve_mesh(free, step_of(free), Timings())
    limit = int(part * peak_bytes(quickest))
    return quickest, replace(free, options=replace(free.options, memory_limit=limit))


def test_pipelines_come_before_placements_that_save_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    quickest, request = _quickest_and_limited(0.2)
    short = why_too_large(request, Timings())
    assert short is not None and why_too_large(_open(), Timings()) is None
    seconds = short.seconds
    assert seconds == pytest.approx(quickest.solution.objective) and short.with_savers() > AHEAD * seconds

    def solved(own: _Pipeline, timings: Timings, best: float) -> Candidate:
        assert best <= AHEAD * seconds
        return Candidate(0.9 * seconds, own.layout, _never, _never)

    monkeypatch.setattr(_Pipeline, "solved", solved)
    monkeypatch.setattr(solve_mesh_module, "_found_limited", lambda *_: pytest.fail("memory is saved without stages"))
    tried = best_plan_module._of_arrangement(request, {}, Timings(), math.inf)
    assert all(candidate.layout is not None for candidate in tried.candidates)
    assert any(excluded.kind == NO_STAGES for excluded in tried.excluded)


@pytest.mark.parametrize("with_savers", [0.999 * AHEAD, 1.001 * AHEAD, math.inf])
def test_pipelines_do_not_come_before_savers_that_are_known_and_quick(
    monkeypatch: pytest.MonkeyPatch, with_savers: float
) -> None:
    asked = list[bool]()

    def staged(*_: Any, is_ahead: bool = False, **__: Any) -> Staged:
        asked.append(is_ahead)
        return Staged()

    short = ShortOfMemoryError("the quickest placements", 1.0, lambda: with_savers)
    monkeypatch.setattr(best_plan_module, "why_too_large", lambda *_: short)
    monkeypatch.setattr(best_plan_module, "with_stages", staged)
    best_plan_module._of_arrangement(_open(), {}, Timings(), math.inf)
    assert asked == ([True, False] if with_savers > AHEAD else [False])


def test_the_quickest_known_savers_fit() -> None:
    """Within nine tenths of what the quickest hold, recomputing some of it is enough, and takes little longer; what is
    found by a search takes no longer than that. Within a hundredth, nothing that is known is enough."""
    _, request = _quickest_and_limited(0.9)
    short = why_too_large(request, Timings())
    assert short is not None and short.seconds < short.with_savers() <= AHEAD * short.seconds
    solved, _ = solve_mesh(request, step_of(request), Timings())
    assert short.seconds < solved.solution.objective <= short.with_savers()
    _, request = _quickest_and_limited(0.01)
    short = why_too_large(request, Timings())
    assert short is not None and math.isinf(short.with_savers())


@pytest.mark.parametrize("required", [{"recompute": "full"}, {"offload": {"activations": "host"}}])
def test_no_savers_are_known_where_they_are_required(required: dict[str, Any]) -> None:
    free = requested("stack", (2, 2), cluster="dgx-a100-80gb", mesh_search=True, **required)
    quickest, _ = solve_mesh(free, step_of(free), Timings())
    limit = int(0.8 * peak_bytes(quickest))
    short = why_too_large(replace(free, options=replace(free.options, memory_limit=limit)), Timings())
    assert short is not None and math.isinf(short.with_savers())


@pytest.mark.parametrize("worth", [1.05, 2.0])
def test_placements_that_save_memory_are_given_up_once_they_take_too_long(worth: float) -> None:
    """Within 0.3 of what the quickest hold, they take 1.27 times as long."""
    quickest, request = _quickest_and_limited(0.3)
    limited = replace(request, worth=worth * quickest.solution.objective)
    if worth == 2.0:
        solution, _ = solve_mesh(limited, step_of(limited), Timings())
        assert 1.0 < solution.solution.objective / quickest.solution.objective < 2.0
        return
    with pytest.raises(TooSlowError) as caught:
        solve_mesh(limited, step_of(limited), Timings())
    assert not caught.value.is_proven and caught.value.seconds > worth * quickest.solution.objective


def test_a_step_in_microbatches_that_is_given_up_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def solved(own: _Pipeline, timings: Timings, best: float) -> Candidate:
        if own.layout.stages == 1:
            raise TooSlowError(own.name, 2.0, is_proven=False, is_least=True)
        return Candidate(1.0, own.layout, _never, _never)

    monkeypatch.setattr(_Pipeline, "solved", solved)
    request = requested("stack", (2,), mesh_search=True, stages=None, microbatches=None)
    found = with_stages(request, {}, Timings(), 1.5, lacks_memory=True).tried
    assert why_excluded(found, LIMIT) == {"no stages x (2,), 2 microbatches": "at least about 2 s"}


def _never() -> Any:
    raise AssertionError("not asked for")


def test_options_that_exclude_a_baseline_are_its_reason() -> None:
    text = str(plan(zero=3))
    assert re.search(r"data parallel +excluded +no placements under zero=3", text)
    assert "no such placements" not in text


@pytest.mark.parametrize("nothing_fits", [True, False])
def test_where_nothing_fits_single_samples_are_tried_at_last(nothing_fits: bool) -> None:
    request = requested(lambda: (Perceptron(), (torch.randn(64, 128),)), (2,), stages=1, microbatches=None)
    best = math.inf if nothing_fits else 1.0
    ((_, counts),) = attempts(request, pipelined_step_of(request), best, lacks_memory=True)
    assert counts == ((2, 4, 8, 64) if nothing_fits else (2, 4, 8))
