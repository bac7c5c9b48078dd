"""Actions of a schedule, folded: the same once unfolded, small where microbatches repeat, garbage named."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError, OptionsError
from autopar.plans.folded_runs import folded, unfolded
from autopar.plans.plan import Plan
from autopar.schedule.named import SCHEDULES, make_schedule
from tests.helpers.planning import planned

WORDS = st.sampled_from(["F0.", "SF0>1.", "B1.", "reduce0", "step", "W1.", "x", "F0.0."])


def test_what_repeats_is_written_once() -> None:
    text = "F0.0 SF0>1.0 F0.1 SF0>1.1 F0.2 SF0>1.2 B0.0 reduce0 step"
    assert folded(text) == "[F0.0 SF0>1.0]*3+1 B0.0 reduce0 step"
    assert unfolded(folded(text)) == text


@pytest.mark.parametrize("text", ["", "step", "F0.00 F0.01", "F0.1 F0.0", "step step step", "F0.9 F0.10"])
def test_anything_stays_as_it_was(text: str) -> None:
    assert unfolded(folded(text)) == text


@given(st.lists(st.tuples(WORDS, st.integers(0, 12)), max_size=40), st.integers(1, 4))
def test_any_actions_come_back(words: list[tuple[str, int]], times: int) -> None:
    listed = [f"{word}{number}" if word.endswith(".") else word for word, number in words]
    text = " ".join(listed * times)
    assert unfolded(folded(text)) == text


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_long_schedules_are_small(name: str) -> None:
    """However many microbatches, but for the first and the last."""
    lengths = []
    for microbatches in (64, 256):
        schedule = make_schedule(name, 4, microbatches)
        texts = [" ".join(map(str, rank)) for rank in schedule.ranks]
        assert [unfolded(folded(text)) for text in texts] == texts
        lengths.append(sum(len(folded(text)) for text in texts))
    assert lengths[1] < 1.3 * lengths[0]


def test_what_stands_for_too_much_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"\[F0.0 B0.0\]\*999999999\+1 stands for more actions"):
        unfolded("[F0.0 B0.0]*999999999+1")


def test_a_plan_with_stages_is_small_and_read_again() -> None:
    plan = planned("stack", (2, 1), stages=2, microbatches=8, schedule="1f1b")
    text = plan.to_json()
    assert "]*" in text and Plan.from_json(text) == plan
    listed = json.loads(text)["pipeline"]["schedule"]["ranks"]
    assert all(len(each) < 200 for each in listed)


@pytest.mark.parametrize("wrong", ["*999999999+1", "*0+1", "*2+x", "*2"])
def test_a_run_of_another_form_is_named(wrong: str) -> None:
    text = planned("stack", (2, 1), stages=2, microbatches=8, schedule="1f1b").to_json()
    edited = re.sub(r"\]\*\d+\+\d+", "]" + wrong, text, count=1)
    with pytest.raises(AutoparError, match=re.escape(wrong)):
        Plan.from_json(edited)
