"""A plan at another batch size: the same choices, priced anew without tracing; refused where they do not divide."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import OptionsError, PlanMismatchError
from autopar.options import Options
from autopar.passes.recompute.draw_again import AGAIN
from autopar.planner.options_of_plan import options_under
from autopar.planner.prepare import Prepared, prepare
from autopar.planner.request import PlanRequest
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from tests.helpers.models import Stack, make, text
from tests.helpers.planning import slow_devices


@cache
def planned(batch: int, optimizer: str = "adamw", compiled: bool = False) -> tuple[Prepared, Plan]:
    cluster = slow_devices()
    base = prepare(Stack(layers=2), (), text(batch, 8), device="cpu", loss_fn=None, training=True)
    options = Options(mesh_search=False, optimizer=optimizer, compile=compiled or "auto")
    request = PlanRequest(base.graph, base.loss, batch, (4,), cluster, options, "Stack")
    return base, best_plan(request, Timings())


def test_repricing_at_its_own_size_changes_nothing() -> None:
    base, plan = planned(8)
    again = autopar.reprice(plan, base, plan.batch, cluster=slow_devices())
    assert again.predicted == plan.predicted and again.lines == plan.lines
    assert again.strategies == plan.strategies and again.parameters == plan.parameters
    assert again.objective == pytest.approx(plan.objective, rel=1e-9)
    assert again.status == "feasible" and again.bound == 0.0


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_plan_from_a_file_is_priced_with_the_options_it_was_made_with(form: str) -> None:
    base, plan = planned(8, "sgd", True)
    read = Plan.from_json(plan.to_json()) if form == "json" else Plan.from_text(plan.to_text())
    assert (read.optimizer, read.compile, read.imbalance) == ("sgd", True, None)
    again = autopar.reprice(read, base, 8, cluster=slow_devices())
    assert (again.predicted, again.lines, again.optimizer) == (plan.predicted, plan.lines, "sgd")
    other = autopar.reprice(read, base, 8, cluster=slow_devices(), options=Options(optimizer="momentum", compile=False))
    assert (other.optimizer, other.compile) == ("momentum", False)
    assert other.predicted.optimizer_bytes > 0 == plan.predicted.optimizer_bytes
    assert other.predicted.compute_seconds > plan.predicted.compute_seconds


def test_a_plan_that_draws_again_is_priced_again() -> None:
    """The trace that is given draws once, as one for steps that are not compiled."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(8, 8)
    plan = autopar.plan(model, (2,), x, cluster=slow_devices(), options=Options(compile=True))
    assert any(AGAIN in name for name in plan.nodes)
    base = prepare(model, (x,), {}, device="cpu", loss_fn=None, training=True)
    assert autopar.reprice(plan, base, 8, cluster=slow_devices()).predicted == plan.predicted


def test_options_beside_a_plan_are_those_it_was_priced_with() -> None:
    plan = replace(planned(8, "sgd", True)[1], imbalance=1.5)
    under = options_under(Options(), plan)
    assert (under.optimizer, under.compile, under.imbalance) == ("sgd", True, 1.5)
    own = options_under(Options(optimizer="momentum", compile=False, imbalance=1.2), plan)
    assert (own.optimizer, own.compile, own.imbalance) == ("momentum", False, 1.2)
    usual = options_under(replace(Options(optimizer="adamw", compile="auto", imbalance=None), seed=1), plan)
    assert (usual.optimizer, usual.compile, usual.imbalance) == ("adamw", "auto", None)


def test_what_is_not_a_traced_model_is_named() -> None:
    _, plan = planned(8)
    with pytest.raises(OptionsError, match=r"not the model Stack itself: .*prepare\.prepare\(model"):
        autopar.reprice(plan, Stack(layers=2), 8)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="a traced model, not 'Stack'"):
        autopar.reprice(plan, "Stack", 8)  # type: ignore[arg-type]


@pytest.mark.slow
def test_repricing_is_the_price_planning_has_there() -> None:
    base, plan = planned(8)
    there = autopar.reprice(plan, base, 16, cluster=slow_devices())
    assert there.batch == 16 and there.parameters == plan.parameters
    assert there.objective == pytest.approx(there.predicted.step_seconds, rel=1e-9)
    assert plan.predicted.step_seconds < there.predicted.step_seconds < 2.2 * plan.predicted.step_seconds
    _, best = planned(16)
    assert best.predicted.step_seconds <= there.predicted.step_seconds * 1.011
    back = autopar.reprice(there, base, 8, cluster=slow_devices())
    assert back.predicted == plan.predicted


def test_a_size_that_does_not_divide_is_refused_with_both_shapes() -> None:
    base, plan = planned(8)
    with pytest.raises(PlanMismatchError, match=r"8, 8.*6, 8|6, 8.*8, 8"):
        autopar.reprice(plan, base, 6, cluster=slow_devices())


def test_another_model_is_refused() -> None:
    _, plan = planned(8)
    model, batch = make("plain")
    other = prepare(model, batch, {}, device="cpu", loss_fn=None, training=True)
    with pytest.raises(PlanMismatchError, match="the plan was made for 'Stack'"):
        autopar.reprice(plan, other, 8)
