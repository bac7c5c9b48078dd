"""The rehearsed memory of stages: what cannot be rehearsed is said."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.search import rehearsed_memory
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
