"""Questions to plans with stages of unequal numbers of devices: what if, why, and their page."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.plans.plan import Plan
from autopar.plans.views.what_if import WhatIf
from tests.helpers.planning import slow_devices
from tests.search.test_unequal_stages import BATCH, bench

ASKED: dict[str, Any] = {"stages": (1, 2), "microbatches": 3, "schedule": "1f1b"}


@cache
def plan() -> Plan:
    own = bench()
    return autopar.plan(own.model, (3,), own.batch, cluster=slow_devices(), options=autopar.Options(**ASKED))


@cache
def asked() -> WhatIf[Plan]:
    limit = int(0.9 * plan().predicted.peak_bytes)
    return plan().whatif(batch=[BATCH, 2 * BATCH], memory_limit=[limit], devices=[4], cluster="dgx-a100-80gb")


def test_what_if_asks_for_the_same_numbers_of_devices() -> None:
    plans = {(answer.sweep, answer.value): answer.plan for answer in asked().answers}
    assert plans["batch", BATCH] == plan()
    larger, limited = plans["batch", 2 * BATCH], plans["memory_limit", int(0.9 * plan().predicted.peak_bytes)]
    assert larger is not None and larger.batch == 2 * BATCH and larger.stage_meshes.sizes == (1, 2)
    assert larger.predicted.step_seconds > plan().predicted.step_seconds
    assert limited is None or limited.predicted.peak_bytes < plan().predicted.peak_bytes
    elsewhere = plans["cluster", "dgx-a100-80gb"]
    assert elsewhere is not None and elsewhere.stage_meshes.sizes == (1, 2)


def test_what_cannot_be_says_what_would() -> None:
    errors = {(answer.sweep, answer.value): answer.error for answer in asked().answers if answer.plan is None}
    assert "stages=(1, 3) would" in errors["devices", 4]
    assert errors["devices", 4].split(":")[0] in " ".join(str(asked()).split())


def test_another_batch_is_what_planning_it_gives() -> None:
    own = bench()
    larger = {name: torch.cat([value, value]) for name, value in own.batch.items()}
    options = autopar.Options(**ASKED)
    fresh = autopar.plan(own.model, (3,), larger, cluster=slow_devices(), options=options)
    (answer,) = (a for a in asked().answers if (a.sweep, a.value) == ("batch", 2 * BATCH))
    assert answer.plan is not None and replace(answer.plan, solve_seconds=0.0) == replace(fresh, solve_seconds=0.0)


def test_the_page_shows_every_stage_and_what_if(tmp_path: Path) -> None:
    plan().to_html(tmp_path / "plan.html", whatif=asked())
    text = html.unescape(re.sub(r"<[^>]+>", " ", (tmp_path / "plan.html").read_text()))
    words = " ".join(text.split())
    assert "dp=1+2" in words or "tp=1+2" in words
    for stage, peak in enumerate(plan().pipeline.peaks):  # type: ignore[union-attr]
        assert f"stage {stage}" in words and peak > 0
    assert "stages=(1, 3) would" in words


def test_why_solves_again_on_the_same_numbers_of_devices() -> None:
    explained = plan().why("head.weight" if "head.weight" in plan().parameters else "embed.weight", solve=True)
    assert explained.forbidden is not None
    assert explained.forbidden.error or explained.forbidden.seconds >= -1e-9 * plan().predicted.step_seconds
