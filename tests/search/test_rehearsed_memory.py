"""The rehearsed memory of stages: what cannot be rehearsed is said."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.placement import memory_bound
from autopar.planner.request import PlanRequest
from autopar.planner.steps import exact_memory
from autopar.planner.timings import Timings
from autopar.search import rehearsed_memory
from autopar.search.best_plan import best_plan
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested
from tests.search.test_best_plan import plan


def _refuse(*_: Any) -> None:
    raise NotImplementedError("no form without data\nof aten.nonzero.default")


def test_a_plan_says_that_its_stages_could_not_be_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}
    exact = plan((2,), **asked)
    assert not any("rehearsed" in warning for warning in exact.warnings)
    monkeypatch.setattr(rehearsed_memory, "rehearse", _refuse)
    billed = plan((2,), **asked)
    why = "NotImplementedError: no form without data of aten.nonzero.default"
    expected = f"memory of stages is an estimate: their steps could not be rehearsed ({why})"
    assert expected in billed.warnings
    assert billed.parameters == exact.parameters


def test_the_estimate_holds_for_steps_whose_weights_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a few narrow layers: as many bytes of them as of everything else are gathered at once."""
    exact = best_plan(narrow_layers(), Timings())
    monkeypatch.setattr(exact_memory, "rehearse", _refuse)
    estimate = best_plan(narrow_layers(), Timings())
    assert any(len(lines) > 1 for lines in exact.sent_together)
    assert exact.parameters == estimate.parameters
    assert exact.predicted.peak_bytes <= estimate.predicted.peak_bytes <= 2 * exact.predicted.peak_bytes
    monkeypatch.setattr(memory_bound, "message_bytes", lambda _: 0)
    assert best_plan(narrow_layers(), Timings()).predicted.peak_bytes < exact.predicted.peak_bytes


def narrow_layers() -> PlanRequest:
    def case() -> Case:
        return Stack(layers=4, width=64, hidden=128), text(4, 4)

    return requested(case, (2,), zero=3, stages=1, microbatches=2, recompute="none")
