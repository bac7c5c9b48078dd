"""The limit that an error names: it is enough, near the least, and the same on any machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.planner import Question, Timings
from autopar.search import answer
from tests.models import Stack, make, text
from tests.questions import ask
from tests.test_solve_budget import hurry

QUESTIONS: dict[str, Callable[[], Question]] = {
    "one device": lambda: ask(Stack(layers=2, width=32, hidden=128), text(4, 4), (1,)),
    "two devices": lambda: ask(Stack(layers=1, width=16, hidden=32), text(8, 8), (2,), recompute="none"),
    "a solver that is cut off": lambda: ask(*make("plain"), (2,), Cluster.get("local"), time_limit=2.0),
}


def refused(question: Question, limit: int) -> str:
    options = replace(question.options, memory_limit=limit)
    with pytest.raises(InfeasibleError) as caught:
        answer(replace(question, options=options), Timings())
    return str(caught.value)


def named(error: str) -> int:
    found = re.search(r"Options\(memory_limit=(\d+)\)", error)
    assert found is not None, error
    return int(found[1])


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_limit_that_is_named_is_enough_and_less_is_not(name: str) -> None:
    question = QUESTIONS[name]()
    error = refused(question, 1000)
    limit = named(error)
    plan = answer(replace(question, options=replace(question.options, memory_limit=limit)), Timings())
    assert plan.predicted.peak_bytes <= limit
    assert named(refused(question, int(0.9 * limit))) == limit


def test_a_busy_machine_names_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    question = QUESTIONS["two devices"]()
    error = refused(question, 1000)
    hurry(monkeypatch)
    assert refused(question, 1000) == error
