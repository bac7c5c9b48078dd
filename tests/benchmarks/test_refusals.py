"""Refusals over the zoo: each that is left has a reason, and the document is that of the rows."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.refusal_reasons import REASONS
from benchmarks.refusals import ACCEPTED, document, is_refused
from tests.zoo.models import ZOO

ROOT = Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "benchmarks" / "results" / "refusals.json").read_text())


def test_every_model_is_asked() -> None:
    assert set(FIGURES["models"]) == set(ZOO)


def test_each_refusal_has_one_reason() -> None:
    refused = sorted(name for name, row in FIGURES["models"].items() if is_refused(row))
    assert sorted(name for reason in REASONS for name in reason.models) == refused


def test_the_document_is_that_of_the_rows() -> None:
    assert document(FIGURES) == (ROOT / "docs" / "refusals.md").read_text()


def test_a_refusal_that_nobody_judged_is_said() -> None:
    row = {"as_it_is": "%x couples the samples", "own_statistics": ACCEPTED, "stages": ACCEPTED, "microbatches": 2}
    text = document({"models": {"gpt2": row}})
    assert "**Not judged** (gpt2)" in text and "Not asked yet: adversarial, albert" in text
