"""Plans that ranks bring along: each made its own, or rank 0 made one for all."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler.agreed_plan import plan_identity
from autopar.runtime.launch import run_local

OPTIONS = autopar.Options(time_limit=60)


def _case() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 8)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _plan(batch: int = 8, **options: Any) -> autopar.Plan:
    model, x = _case()
    return autopar.plan(model, (4,), (x[:batch],), loss_fn=_loss, options=replace(OPTIONS, **options))


def _run(rank: int, world: int, brought: str) -> tuple[float, dict[str, torch.Tensor], str, list[str]]:
    """One step under the plan that this rank brings; loss, gradients, which plan ran, what was warned of."""
    model, x = _case()
    plan: autopar.Plan | None = _plan(
        zero=3 if brought == "others" and rank == 2 else None, batch=4 if brought == "batches" and rank == 3 else 8
    )
    if (brought == "first" and rank > 0) or (brought == "second" and rank != 1):
        plan = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel = autopar.parallelize(model, (4,), plan=plan, loss_fn=_loss)
    loss = float(parallel.step(x))
    gradients = {name: parallel.full_tensor(p.grad) for name, p in parallel.named_parameters()}
    return loss, gradients, plan_identity(parallel.plan), [str(one.message) for one in caught]


@pytest.mark.parametrize("brought", [pytest.param("first", marks=pytest.mark.slow), "others"])
def test_the_first_ranks_plan_runs_on_all(brought: str) -> None:
    model, x = _case()
    expected = _loss(model(x))
    expected.backward()
    planned = plan_identity(_plan())
    for rank, (loss, gradients, ran, warned) in enumerate(run_local(_run, 4, timeout=120, args=(brought,))):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
        assert ran == planned
        about = [text for text in warned if "another plan" in text]
        assert about == [] if brought == "first" or rank else len(about) == 1 and about[0].startswith("ranks 2 pass")


@pytest.mark.parametrize(
    ("brought", "said"),
    [
        ("second", "rank 0, whose plan"),
        pytest.param("batches", "plan with batch 4, rank", marks=pytest.mark.slow),
    ],
)
def test_plans_that_cannot_be_one_are_refused(brought: str, said: str) -> None:
    with pytest.raises(autopar.AutoparError, match=said):
        run_local(_run, 4, timeout=120, args=(brought,))


def test_what_planning_took_does_not_tell_plans_apart_and_what_runs_does() -> None:
    plan = _plan()
    slower = replace(plan, solve_seconds=plan.solve_seconds + 1, timings={"trace": 9.0}, warnings=("took long",))
    assert plan_identity(slower) == plan_identity(plan)
    assert plan_identity(_plan(zero=3)) != plan_identity(plan)
    for name, value in {
        "batch": 4,
        "graph_hash": "",
        "microbatches": 2,
        "recomputed": ("x",),
        "schedule": "1f1b",
    }.items():
        assert plan_identity(replace(plan, **{name: value})) != plan_identity(plan), name
    staged = _plan(stages=2, microbatches=2)
    assert staged.pipeline is not None
    other = replace(staged, pipeline=replace(staged.pipeline, cuts=("elsewhere",)))
    assert plan_identity(other) != plan_identity(staged)
    priced = replace(staged, pipeline=replace(staged.pipeline, update_seconds=1.0))
    assert plan_identity(priced) == plan_identity(staged)
