"""A layout costs what the plan that it restricts costs, term by term: both are priced by the same functions. Where the
planner does otherwise, rightly, the difference is that and no more."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.cluster.description import Cluster
from benchmarks.layout_plans import (
    CLUSTER,
    GPT,
    SHAPES,
    Terms,
    full_layout,
    planned,
    priced,
    terms_of_plan,
    terms_of_price,
)
from tests.helpers.marks import slow_but

LAYOUTS = ("data=1 microbatch=8", "data=2 microbatch=4", "data=2 microbatch=4 zero=1", "data=4 microbatch=2")
ACCUMULATING = (
    *("data=1 microbatch=2", "data=2 microbatch=2", "data=2 microbatch=1 zero=1"),
    *("pipeline=2 data=1 microbatch=2", "pipeline=2 data=2 microbatch=1"),
)
DEVICE = Cluster.get(CLUSTER).device
# Operations on the labels of the whole batch, of which each data rank takes its slice.
LABELS = 4 * DEVICE.launch_seconds


@cache
def terms(model: str, text: str) -> tuple[Terms, Terms]:
    """Those of the price, and those of the plan."""
    layout, shape = full_layout(text), SHAPES[model]
    return terms_of_price(priced(shape, layout)), terms_of_plan(planned(shape, layout))


def norms_anew(text: str) -> float:
    """The most seconds that a plan takes to compute the results of a step's RMS norms once more in backward, for the
    products that take them, where the emulator keeps them: a kernel of five passes over rows in fp32 for each norm."""
    layout = full_layout(text)
    layers, tokens = GPT.layers / layout.pipeline, layout.microbatch * GPT.seq
    each = DEVICE.launch_seconds + 5 * 4 * tokens * GPT.hidden / DEVICE.memory_bandwidth
    return each * (2 * layers + 1) * max(1, 8 // (layout.data * layout.microbatch))


@pytest.mark.parametrize("text", slow_but(LAYOUTS[1:2], LAYOUTS))
def test_a_layout_of_a_gpt_costs_what_its_plan_costs(text: str) -> None:
    """Computing, exposed reductions, the update and the step, to floating-point accuracy. (On data ranks a plan counts
    the labels of the whole batch.)"""
    price, plan = terms("gpt", text)
    alone = "data=1" in text.split()
    for name in ("weights", "gradients", "update", "bubble"):
        assert price[name] == pytest.approx(plan[name], rel=1e-9, abs=1e-12), name
    for name in ("forward", "backward"):
        assert price[name] == pytest.approx(plan[name], rel=1e-9 if alone else 1e-5), name
    assert 0 <= plan["tensor"] - price["tensor"] <= (0 if alone else LABELS)
    assert price["step"] == pytest.approx(plan["step"], rel=1e-9, abs=0 if alone else LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_of_a_llama_costs_what_its_plan_costs_but_for_its_norms(text: str) -> None:
    """A plan may also send the rows of the embedding's gradient (a reshard) where the emulator reduces its table: it
    does where that is faster."""
    price, plan = terms("llama", text)
    for name in ("weights", "bubble"):
        assert price[name] == pytest.approx(plan[name], rel=1e-9, abs=1e-12), name
    assert price["forward"] == pytest.approx(plan["forward"], rel=1e-5)
    anew = plan["backward"] - price["backward"]
    assert 0 < anew <= norms_anew(text)
    sent = [side["gradients"] + side["tensor"] for side in (price, plan)]
    assert abs(sent[1] - sent[0]) <= LABELS
    rest = [side["step"] - side["gradients"] - side["tensor"] for side in (price, plan)]
    assert rest[1] - rest[0] == pytest.approx(anew + plan["update"] - price["update"], rel=1e-3)
    assert price["update"] == pytest.approx(plan["update"], rel=1e-9)


@pytest.mark.parametrize("text", slow_but(["pipeline=2 data=1 microbatch=2"], ACCUMULATING))
@pytest.mark.parametrize("model", slow_but(["gpt"], ["gpt", "llama"]))
def test_microbatches_cost_what_those_of_the_plan_cost(model: str, text: str) -> None:
    """But that a plan counts the labels of the whole batch at once, a few launches less, and a Llama's norms anew.
    Bubbles are equal, since stages of the same computing are simulated in the same way."""
    price, plan = terms(model, text)
    alone = "data=1" in text.split()
    # Of two stages the fuller one may be the other: they differ by a norm and a head or an embedding.
    norm = 4 * 2 * GPT.hidden
    for name, bytes_of_norm in (("weight", norm), ("gradient", norm), ("optimizer", 2 * norm)):
        if alone or name == "optimizer":
            assert price[name] == pytest.approx(plan[name], rel=1e-9, abs=bytes_of_norm), name
    anew = norms_anew(text) if model == "llama" else 0.0
    assert price["update"] == pytest.approx(plan["update"], rel=1e-9)
    assert price["forward"] == pytest.approx(plan["forward"], rel=2e-3)
    assert 0 <= plan["backward"] - price["backward"] * (1 - 2e-3) <= anew + 4e-3 * plan["backward"]
    sent = [side["gradients"] + side["tensor"] for side in (price, plan)]
    assert abs(sent[1] - sent[0]) <= LABELS + 2e-3 * sent[1]
    for name in ("bubble", "step"):
        assert price[name] == pytest.approx(plan[name], rel=5e-3, abs=2 * anew + 1e-12), name
