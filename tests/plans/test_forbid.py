"""``plan.why(name, solve=True)``: the plan solved again with a choice forbidden; pins that forbid."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import autopar
from autopar.errors import OptionsError
from autopar.ir.placements import short
from autopar.plans.plan import Plan
from tests.helpers.plan_model import Small

BATCH = {name: torch.zeros(32, 512, dtype=torch.long, device="meta") for name in ("ids", "labels")}


def _planned(**options: object) -> Plan:
    with torch.device("meta"):
        model = Small()
    return autopar.plan(model, (2, 2), BATCH, cluster="dgx-a100-80gb", options=autopar.Options(**options))  # type: ignore[arg-type]


@cache
def _asked() -> Plan:
    return _planned()


def test_a_parameter_that_may_not_be_placed_so_costs_the_difference_of_two_plans() -> None:
    plan, name = _asked(), "head.weight"
    forbidden = plan.why(name, solve=True).forbidden
    assert forbidden is not None and forbidden.choice == short(plan.parameters[name].weight)
    other = _planned(pins={name: f"not {forbidden.choice}"})
    assert short(other.parameters[name].weight) == forbidden.instead != forbidden.choice
    assert forbidden.seconds == pytest.approx(other.predicted.step_seconds - plan.predicted.step_seconds)
    assert forbidden.seconds >= -2 * 0.01 * plan.predicted.step_seconds  # Both are within the gap.


@pytest.mark.slow
def test_what_layers_choose_alike_is_forbidden_in_all() -> None:
    why = _asked().why("blocks.1.first", solve=True)
    assert why.forbidden is not None and why.forbidden.together == 3 and not why.forbidden.error
    said = re.sub(r"\s+", " ", str(why))
    assert f"solved again, {why.forbidden.choice} forbidden in all 3 layers: " in said
    assert f"with {why.forbidden.instead}" in said


@pytest.mark.slow
def test_an_activation_by_the_name_of_its_node() -> None:
    plan = _asked()
    node = next(name for name, each in plan.nodes.items() if each.op == "aten.relu.default")
    forbidden = plan.why(f"%{node}", solve=True).forbidden
    assert forbidden is not None and forbidden.instead != forbidden.choice == short(plan.strategies[node].outputs[0])
    assert plan.why(f"%{node}").forbidden is None


@pytest.mark.slow
def test_without_another_way_the_reason_is_said() -> None:
    plan = _planned(pins={"head.weight": "R,S(0)"}, zero=0)
    why = plan.why("head.weight", solve=True)
    if why.alternatives is None:
        assert why.forbidden is None
        return
    assert why.forbidden is not None and "contradicts" in why.forbidden.error and "no plan" in str(why)


def test_a_plan_from_a_file_does_not_know_its_model() -> None:
    read = Plan.from_json(_asked().to_json())
    with pytest.raises(OptionsError, match=r"ask the plan that autopar.plan"):
        read.why("head.weight", solve=True)


@pytest.mark.slow
def test_a_pin_that_forbids_does_not_count_as_the_users_choice() -> None:
    plan = _planned(pins={"embed.weight": "not R,R"})
    assert plan.why("embed.weight").provenance == "price"
    assert short(plan.parameters["embed.weight"].weight) != "R,R"
