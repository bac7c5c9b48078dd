"""What travels while a step computes: the bill takes back what the solver took for hidden, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.plan_timeline import step_timeline
from autopar.planner import Timings, solve_mesh
from autopar.prices import exchanged_bytes
from autopar.problem import evaluate, sides_of
from autopar.repeats import ONCE, Repeats
from autopar.search import answer
from autopar.step_graphs import step_graph
from autopar.windows import hidden_shares
from tests.models import make
from tests.questions import CLUSTER, ask


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of tests would fit into one bucket, and hide nothing."""
    monkeypatch.setattr("autopar.windows.BUCKET_BYTES", 1 << 10)


@pytest.mark.parametrize("changes", [{}, {"zero": 3}, {"zero": 1}], ids=str)
def test_the_bill_takes_back_what_the_program_hides(changes: dict[str, Any]) -> None:
    model, batch = make("plain")
    apart = replace(Cluster.get(CLUSTER), overlaps=False)
    seconds = {}
    for cluster in (Cluster.get(CLUSTER), apart):
        question = ask(model, batch, (2, 2), cluster=cluster, **changes)
        best, _ = solve_mesh(question, step_graph(question.graph, question.loss, question.batch), Timings())
        problem, chosen = best.instance.problem, best.solution.choices
        assert evaluate(problem, chosen) == pytest.approx(best.account.seconds, rel=1e-9)
        hidden = [line for line in best.account.lines if line.kind == "hidden"]
        assert [window.name for window in problem.windows] == (["forward", "backward"] if cluster.overlaps else [])
        sides = {window.name: sides_of(problem, window, chosen) for window in problem.windows}
        for line in hidden:
            share = next(window.hidden for window in problem.windows if window.name == line.phase)
            assert line.seconds == pytest.approx(-share * min(sides[line.phase]), rel=1e-9)
        seconds[cluster.overlaps] = best.account.seconds
    assert seconds[True] <= seconds[False] * 1.02  # Within the gap both were solved to.
    if changes:
        assert seconds[True] < seconds[False]


def test_what_may_hide() -> None:
    model, batch = make("plain")
    question = ask(model, batch, (4,))
    graph = step_graph(question.graph, question.loss, question.batch)
    sizes = [int(node.type.bytes) for node in graph.placeholders("param")]
    shares = hidden_shares(graph, question.cluster, ONCE)
    assert shares["forward"] == pytest.approx(1 - max(sizes) / sum(sizes))
    assert shares["backward"] == pytest.approx(1 - max(*sizes, 1 << 10) / exchanged_bytes(graph))
    assert hidden_shares(graph, question.cluster, Repeats(2, 1, accumulates=True)) == {}
    assert hidden_shares(graph, replace(question.cluster, overlaps=False), ONCE) == {}


def test_one_bucket_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.windows.BUCKET_BYTES", 1 << 40)
    model, batch = make("plain")
    question = ask(model, batch, (4,))
    graph = step_graph(question.graph, question.loss, question.batch)
    assert "backward" not in hidden_shares(graph, question.cluster, ONCE)


def test_the_timeline_of_what_travels_meanwhile_ends_with_the_step() -> None:
    model, batch = make("plain")
    plan = answer(ask(model, batch, (2, 2), zero=3), Timings())
    assert plan.seconds_of("hidden") < 0
    spans = step_timeline(plan).spans
    assert max(span.end for span in spans) == pytest.approx(plan.predicted.step_seconds)
    assert min(span.start for span in spans) >= -1e-12
    assert "hidden by computing" in str(plan)
