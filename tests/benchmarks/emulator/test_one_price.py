"""A layout costs what the plan that it restricts costs, term by term: both are priced by the same functions."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.cluster.description import Cluster
from benchmarks.layout_plans import CLUSTER, SHAPES, Terms, full_layout, planned, priced, terms_of_plan, terms_of_price
from tests.helpers.marks import slow_but

LAYOUTS = ("data=1 microbatch=8", "data=2 microbatch=4", "data=2 microbatch=4 zero=1", "data=4 microbatch=2")
ACCUMULATING = (
    *("data=1 microbatch=2", "data=2 microbatch=2", "data=2 microbatch=1 zero=1"),
    *("pipeline=2 data=1 microbatch=2", "pipeline=2 data=2 microbatch=1"),
)


@cache
def terms(model: str, text: str) -> tuple[Terms, Terms]:
    """Those of the price, and those of the plan."""
    layout, shape = full_layout(text), SHAPES[model]
    return terms_of_price(priced(shape, layout)), terms_of_plan(planned(shape, layout))


@pytest.mark.parametrize("text", slow_but(LAYOUTS[1:2], LAYOUTS))
@pytest.mark.parametrize("model", slow_but(["gpt"], ["gpt", "llama"]))
def test_a_layout_costs_what_its_plan_costs(model: str, text: str) -> None:
    """Computing, exposed reductions, the update and the step, to floating-point accuracy. (On data ranks a plan counts
    the labels of the whole batch, of which each takes its slice: some launches.)"""
    price, plan = terms(model, text)
    alone, launches = "data=1" in text.split(), 4 * Cluster.get(CLUSTER).device.launch_seconds
    for name in ("weights", "gradients", "update", "bubble"):
        assert price[name] == pytest.approx(plan[name], rel=1e-9, abs=1e-12), name
    for name in ("forward", "backward"):
        assert price[name] == pytest.approx(plan[name], rel=1e-9 if alone else 1e-5), name
    assert 0 <= plan["tensor"] - price["tensor"] <= (0 if alone else launches)
    assert price["step"] == pytest.approx(plan["step"], rel=1e-9, abs=0 if alone else 2 * launches)


@pytest.mark.parametrize("text", slow_but(["pipeline=2 data=1 microbatch=2"], ACCUMULATING))
@pytest.mark.parametrize("model", slow_but(["gpt"], ["gpt", "llama"]))
def test_microbatches_cost_what_those_of_the_plan_cost(model: str, text: str) -> None:
    """But that a plan counts the labels of the whole batch at once, a few launches less. Bubbles are equal, since
    stages of the same computing are simulated in the same way."""
    price, plan = terms(model, text)
    for name in ("update", "optimizer", *(["weight", "gradient"] if "data=1" in text.split() else [])):
        assert price[name] == pytest.approx(plan[name], rel=1e-9), name
    for name in ("forward", "backward", "gradients", "bubble", "step"):
        assert price[name] == pytest.approx(plan[name], rel=2e-3), name
