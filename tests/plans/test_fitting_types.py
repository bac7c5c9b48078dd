"""The quick check of declared types finds wrong exactly what the check that says where finds wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal
from unittest.mock import Mock

import pytest

from autopar.ir.placements import Strategy, parse_placements
from autopar.ir.plan_record import PlanLine, PlanRecord, ReshardStep
from autopar.plans import moves, validate
from autopar.plans.field_types import wrong_fields, wrong_types
from autopar.plans.fitting_types import fitting, hints
from autopar.plans.plan import Plan
from tests.helpers.planning import planned, slow_devices

STEP = ReshardStep("all_reduce", (0,), "(P)", "(R)", 8)
LINE = PlanLine("reshard", "a", "", "forward", 1.0, (STEP, STEP))
PLACES = parse_placements("S(0),R")
KINDS: tuple[Any, ...] = (
    *(str, int, float, bool, Any, int | None, float | str, Literal["a", "b"]),
    *(tuple[int, ...], tuple[int, str], tuple[tuple[int, ...], ...], Mapping[str, float], Mapping[str, int | None]),
    *(ReshardStep, PlanLine, tuple[PlanLine, ...], Mapping[str, PlanLine | None], Strategy),
)
VALUES: tuple[Any, ...] = (
    *("a", "c", 1, -1, 1 << 70, True, None, 1.5, math.nan, math.inf, 1e301, (), (1, 2), (1, "a"), [1], ((1,), (2.0,))),
    *({}, {"a": 1.0}, {"a": None}, {1: 1.0}, {"a": math.inf}, STEP, LINE, dataclasses.replace(LINE, times=2.5)),
    *((LINE, LINE), (LINE, STEP), (LINE, dataclasses.replace(LINE, steps=(LINE,))), {"a": LINE, "b": None}),
    *(dataclasses.replace(STEP, axes=[0]), dataclasses.replace(STEP, bytes="8"), Strategy((PLACES,), (PLACES,), "")),
    Strategy(("R",), (PLACES,), ""),
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_fits_has_no_wrong_types(kind: Any) -> None:
    fits = {place: fitting(kind)(value) for place, value in enumerate(VALUES)}
    assert fits == {place: not list(wrong_types(value, kind, "x")) for place, value in enumerate(VALUES)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("stack", (2, 2), slow_devices(), stages=1)


@pytest.mark.parametrize("name", sorted(hints(PlanRecord)))
def test_a_wrong_field_is_found(plan: Plan, name: str) -> None:
    """Each field once as it is, and once as something that it is not."""
    kind = hints(PlanRecord)[name]
    assert fitting(kind, is_unbounded=True)(getattr(plan, name))
    broken = dataclasses.replace(plan, **{name: object()})
    assert not fitting(kind)(broken.__getattribute__(name))
    (problem,) = wrong_fields(broken, PlanRecord, "")
    assert problem.startswith(f"{name} is <object")


def test_what_lines_share_is_checked_once(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan that was read: its file has equal steps once."""
    read = Plan.from_json(plan.to_json())
    assert read == plan
    hops, steps = Mock(side_effect=moves._hop), Mock(side_effect=validate._steps)
    monkeypatch.setattr(moves, "_hop", hops)
    monkeypatch.setattr(validate, "_steps", steps)
    read.validate()
    moved = [line for line in read.lines if line.steps]
    assert 0 < steps.call_count < len(moved)
    assert 0 < hops.call_count < sum(len(line.steps) for line in moved)
