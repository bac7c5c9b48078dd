"""Pipelines and steps in microbatches where memory is short: what the program counts is more than their steps hold, and
the quickest that fits is found all the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search import rehearsed_memory
from autopar.search.best_plan import best_plan
from autopar.search.rehearsed_memory import search_within
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested

LIMIT = 1000.0
Pipeline = tuple[float, float, float]


def wide_layers() -> Case:
    return Stack(layers=2, width=64, hidden=128), text(16, 8)


def plan(**asked: Any) -> Plan:
    return best_plan(requested(wide_layers, (2,), **asked), Timings())


def test_the_quickest_step_in_microbatches_is_found_where_it_just_fits() -> None:
    free = plan(stages=1, microbatches=2)
    tight = plan(stages=1, microbatches=2, memory_limit=free.predicted.peak_bytes)
    assert tight.predicted == free.predicted
    assert tight.parameters == free.parameters
    assert tight.status == "optimal"


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_counted_proves_nothing_of_what_steps_hold(stages: int) -> None:
    free = plan(stages=stages, microbatches=2)
    tight = plan(stages=stages, microbatches=2, memory_limit=int(0.8 * free.predicted.peak_bytes))
    assert tight.objective > 1.01 * free.objective
    assert tight.bound <= (1.0 + 1e-9) * free.objective
    assert (tight.status == "optimal") == (tight.gap <= Options().gap)


def _search(monkeypatch: pytest.MonkeyPatch, pipelines: Sequence[Pipeline]) -> Callable[[], Any]:
    """Searches within the limit among ``pipelines``, of so many counted and held bytes and of so many seconds. The
    quickest is the first."""
    searched = list[float]()

    def search(request: Any) -> Any:
        (limit,) = request.limits
        searched.append(limit)
        fitting = [each for each in pipelines if each[0] <= limit]
        if not fitting or (request.solve == "quickest" and fitting[0] != pipelines[0]):
            raise InfeasibleError("nothing fits").needing(math.ceil(min(counted for counted, _, _ in pipelines)))
        counted, held, seconds = min(fitting, key=lambda each: each[2])
        program = SimpleNamespace(objective=seconds, memory_price=0.0)
        uncut, layout = SimpleNamespace(solution=program, unlimited=pipelines[0][2]), SimpleNamespace(stages=2)
        return SimpleNamespace(
            peaks=(counted,), held=held, seconds=seconds, uncut=uncut, layout=layout, is_one_step=False
        )

    monkeypatch.setattr(rehearsed_memory, "search", search)
    monkeypatch.setattr(rehearsed_memory, "held_beyond", lambda solution, limits: solution.held - limits[0])
    monkeypatch.setattr(rehearsed_memory, "replace", lambda of, **new: SimpleNamespace(**{**vars(of), **new}))
    request = SimpleNamespace(
        limits=(LIMIT,), solve="any", quickest="quickest", gap=0.01, best=math.inf, layout=SimpleNamespace(stages=2)
    )
    return lambda: (search_within(request).seconds, len(searched))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pipelines", "seconds"),
    [
        pytest.param([(1200, 1000, 1.0), (900, 800, 2.0)], 1.0, id="the quickest fits and counts more"),
        pytest.param([(1400, 1300, 1.0), (1150, 990, 1.5), (900, 800, 2.0)], 1.5, id="memory is left"),
        pytest.param([(1900, 1800, 1.0), (1150, 990, 1.5), (900, 800, 2.0)], 1.5, id="the quickest counts too much"),
        pytest.param([(1400, 1300, 1.0), (1150, 990, 2.0)], 2.0, id="nothing counts so few"),
        pytest.param([(1200, 1100, 1.0), (1000, 1050, 1.5), (900, 940, 2.0)], 2.0, id="more is held than counted"),
        pytest.param([(800, 700, 1.0)], 1.0, id="everything fits"),
    ],
)
def test_the_quickest_pipeline_that_fits_is_found(
    monkeypatch: pytest.MonkeyPatch, pipelines: Sequence[Pipeline], seconds: float
) -> None:
    found, searches = _search(monkeypatch, pipelines)()
    assert found == seconds
    assert searches <= rehearsed_memory.ROUNDS + rehearsed_memory.MORE_ROUNDS


def test_what_counts_much_too_much_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfeasibleError) as raised:
        _search(monkeypatch, [(1900, 1800, 1.0), (1600, 1500, 2.0)])()
    assert raised.value.needed_bytes == 1600
