"""What travels while a step computes: the cost breakdown takes back what the solver took for hidden, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster.description import Cluster
from autopar.cost.overlap import TAKEN
from autopar.ir.microbatching import ONCE, Repeats
from autopar.placement.overlap_windows import (
    HiddenShares,
    SectionSeconds,
    gather_windows,
    hidden_shares,
    shares_of_sizes,
    windows_of,
)
from autopar.placement.prices import exchanged_bytes
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.views.step_timeline import step_timeline
from autopar.search.best_plan import best_plan
from autopar.solver.problem import evaluate, sides_of
from tests.helpers.marks import slow_but
from tests.helpers.planning import CLUSTER, requested


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of tests would fit into one bucket, and hide nothing."""
    monkeypatch.setattr("autopar.placement.overlap_windows.BUCKET_BYTES", 1 << 10)


@pytest.mark.parametrize("changes", slow_but([{}, {"zero": 1}], [{}, {"zero": 3}, {"zero": 1}]), ids=str)
def test_the_cost_breakdown_takes_back_what_the_program_hides(changes: dict[str, Any]) -> None:
    apart = replace(Cluster.get(CLUSTER), overlaps=False)
    seconds = {}
    for cluster in (Cluster.get(CLUSTER), apart):
        request = requested("plain", (2, 2), cluster=cluster, **changes)
        best, _ = solve_mesh(request, step_graph(request.graph, request.loss, request.batch), Timings())
        problem, chosen = best.instance.problem, best.solution.choices
        assert evaluate(problem, chosen) == pytest.approx(best.breakdown.seconds, rel=1e-9)
        hidden = [line for line in best.breakdown.lines if line.kind == "hidden"]
        windows = {window.name: window for window in problem.windows}
        assert {"forward", "reductions"} <= set(windows) if cluster.overlaps else not windows
        assert {line.name for line in hidden} <= set(windows)
        for line in hidden:
            expected = -windows[line.name].hidden * min(sides_of(problem, windows[line.name], chosen))
            assert line.seconds == pytest.approx(expected, rel=1e-9)
        seconds[cluster.overlaps] = best.breakdown.seconds
    assert seconds[True] <= seconds[False] * 1.02  # Within the gap both were solved to.
    if changes:
        assert seconds[True] < seconds[False]


def test_parameters_without_elements_hide_nothing() -> None:
    assert shares_of_sizes([0, 0], 0, requested("plain", (4,)).cluster) == HiddenShares()


def test_what_may_hide() -> None:
    request = requested("plain", (4,))
    graph = step_graph(request.graph, request.loss, request.batch)
    sizes = [int(node.type.bytes) for node in graph.placeholders("param")]
    shares = hidden_shares(graph, request.cluster)
    assert shares.gathers == pytest.approx(1 - max(sizes) / sum(sizes))
    assert shares.reductions == pytest.approx(1 - max(*sizes, 1 << 10) / exchanged_bytes(graph))
    assert shares.taken == TAKEN
    assert hidden_shares(graph, replace(request.cluster, overlaps=False)) == HiddenShares(0.0, 0.0)
    assert shares_of_sizes(sizes, 0, request.cluster, 1, sum(sizes) // 2).gathers == pytest.approx(0.5)
    first, second = sorted(sizes, reverse=True)[:2]
    apart = hidden_shares(graph, request.cluster, 2)
    assert apart.gathers == pytest.approx(1 - (first + second) / sum(sizes)), "each stage has a first gather"


def test_windows_of_several_microbatches() -> None:
    """Gathers hide in every backward, reductions in the last, behind what gathers leave of it."""
    request = requested("plain", (4,))
    graph = step_graph(request.graph, request.loss, request.batch)
    shares, count = hidden_shares(graph, request.cluster), 3
    windows = windows_of(graph, request.cluster, Repeats(count, 1, accumulates=True))
    assert [window.times for window in windows] == [3, 3, 1]
    for gathers, reductions in ((1.0, 0.5), (1.0, 2.0), (5.0, 1.0), (0.0, 9.0)):
        sides = {"backward": SectionSeconds(2.0, gathers), "forward": SectionSeconds()}
        hidden = sum(window.seconds(sides, reductions) for window in windows)
        each, last = (min((1 - TAKEN) * messages, 2.0) for messages in (gathers, gathers + reductions))
        assert hidden == pytest.approx(count * shares.gathers * each + shares.reductions * (last - each))
        assert shares.reductions * (last - each) == shares.of_reductions(sides["backward"], reductions)


def test_a_backward_in_halves_has_two_windows() -> None:
    windows = gather_windows(HiddenShares(0.5, 0.25), 3, ("weight_gradient", "backward", "weight_gradient"))
    assert {window.name: window.times for window in windows} == {
        "forward": 3,
        "backward": 1,
        "input_gradient": 2,
        "weight_gradient": 2,
    }
    sides = {"input_gradient": SectionSeconds(1.0, 3.0), "weight_gradient": SectionSeconds(4.0, 0.0)}
    hidden = {window.name: window.seconds(sides, 100.0) for window in windows}
    assert hidden == {"forward": 0.0, "backward": 0.5 * 3.0, "input_gradient": 0.5 * 2 * 1.0, "weight_gradient": 0.0}


def test_one_bucket_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.placement.overlap_windows.BUCKET_BYTES", 1 << 40)
    request = requested("plain", (4,))
    graph = step_graph(request.graph, request.loss, request.batch)
    names = [window.name for window in windows_of(graph, request.cluster, ONCE)]
    assert names == ["forward", "backward"], "gathers hide in backward all the same"


@pytest.mark.parametrize("microbatches", [2, 4])
def test_accumulated_gradients_travel_beside_the_last_backward(microbatches: int) -> None:
    """The program's windows, the cost breakdown of the plan and the simulated step are one figure."""
    request = requested("plain", (2, 2), stages=1, microbatches=microbatches, zero=3)
    plan = best_plan(request, Timings())
    assert (plan.stages, plan.microbatches) == (1, microbatches)
    assert plan.predicted.step_seconds == pytest.approx(plan.objective, rel=1e-9)
    assert sum(line.seconds for line in plan.lines) == pytest.approx(plan.objective, rel=1e-9)
    hidden = {line.name: -line.seconds for line in plan.lines if line.kind == "hidden"}
    assert min(hidden["forward"], hidden["backward"], hidden["reductions"]) > 0
    assert "hidden by computing" in str(plan)
    timeline = step_timeline(plan)
    assert timeline.seconds == pytest.approx(plan.objective)
    (reduce,) = (span for span in timeline.spans if span.name.startswith("reduce"))
    last = max((span for span in timeline.spans if span.lane == "compute"), key=lambda span: span.start)
    backward = max((s for s in timeline.spans if s.name.startswith("B")), key=lambda span: span.start)
    assert backward.start <= reduce.start < backward.end <= reduce.end <= last.start + 1e-12
    apart = replace(request.cluster, overlaps=False)
    other = best_plan(replace(request, cluster=apart), Timings())
    assert other.seconds_of("hidden") == 0.0
    assert other.predicted.step_seconds == pytest.approx(other.objective, rel=1e-9)
    assert other.predicted.step_seconds * 1.02 > plan.predicted.step_seconds


def test_the_timeline_of_what_travels_meanwhile_ends_with_the_step() -> None:
    plan = best_plan(requested("plain", (2, 2), zero=3), Timings())
    assert plan.seconds_of("hidden") < 0
    spans = step_timeline(plan).spans
    assert max(span.end for span in spans) == pytest.approx(plan.predicted.step_seconds)
    assert min(span.start for span in spans) >= -1e-12
    assert "hidden by computing" in str(plan)
