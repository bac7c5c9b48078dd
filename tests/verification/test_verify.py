"""verify: compares with one process, reports a difference where there is one, and ends whatever its ranks do."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanMismatchError, TraceError, WorkerError
from autopar.verification.gradients import compare
from autopar.verification.report import OneStep, Report, judge
from autopar.verification.steps import _doubled
from autopar.verification.tolerance import Closeness
from tests.helpers.models import Stack, make, plain, text
from tests.helpers.planning import CLUSTER


def check(model: nn.Module, batch: Any, mesh: Any = (2,), **changes: Any) -> Report:
    return autopar.verify(model, mesh, batch, cluster=CLUSTER, timeout=60, **changes)


def test_report_of_a_model_that_is_right() -> None:
    model, batch = make("stack")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check(model, batch, options=autopar.Options(zero=3, mesh_search=False))
    assert report.ok and report.max_error <= 1e-5 and report.loss_error <= report.max_error
    assert report.gradient_errors.keys() == {name for name, _ in model.named_parameters()}
    assert report.plan.mesh == (2,) and report.seconds > report.step_seconds > 0
    assert report.unpriced == ()
    assert "equal to one process within 1e-05" in str(report) and "gradient of " in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not isinstance(p, torch.distributed.tensor.DTensor) and p.grad is None for p in model.parameters())


class Deceitful(nn.Module):
    """Computes something else once torch.distributed is running on more than one process."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1.001 if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 1.0
        return (self.linear(x) * factor).pow(2).mean()


def test_a_difference_is_found() -> None:
    report = check(Deceitful(), torch.randn(8, 12))
    assert not report.ok
    assert 1e-4 < report.loss_error < 1e-2
    assert str(report).startswith("NOT EQUAL to one process")


def test_nan_is_not_ok() -> None:
    assert not report_with(math.nan).ok
    assert report_with(1e-6).ok and not report_with(1e-3).ok


def test_a_plan_that_divides_nothing_is_said_to() -> None:
    """By what its devices compute, whatever its axes are called: a DeviceMesh has names of its user's."""
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    idle, stored, divided = (
        autopar.plan(layers, (2,), torch.randn(rows, 16), cluster="dgx-a100-80gb", options=options, loss_fn=torch.sum)
        for rows, options in ((32, None), (32, autopar.Options(zero=3)), (1 << 16, None))
    )
    assert (idle.axis_names, divided.axis_names) == (("idle",), ("dp",))
    plans = idle, replace(idle, axis_names=("dp",)), divided, replace(divided, axis_names=("idle",)), stored
    said = [Report(plan, 1e-5, 1.0, 0.0, {"weight": 0.0}, {}, 1.0, 0.1) for plan in plans]
    assert [report.divides_nothing for report in said] == [True, True, False, False, False]
    assert ["nothing is divided" in str(report) for report in said] == [True, True, False, False, False]
    assert not report_with(0.0).divides_nothing


def report_with(error: float) -> Report:
    plan = autopar.plan(nn.Linear(4, 4), (1,), torch.randn(4, 4), cluster=CLUSTER, loss_fn=lambda out: out.sum())
    return Report(plan, 1e-5, 1.0, 0.0, {"weight": error}, {}, 1.0, 0.1)


@pytest.mark.parametrize(
    ("found", "expected", "off", "error", "noise"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0, False),
        ([1.0, 2.5], [1.0, 2.0], 0.0, 0.25, False),
        ([1e-9, 0.0], [0.0, 0.0], 0.0, math.inf, False),
        ([2e-9, 0.0], [1e-9, 0.0], 1e-9, 1e-6, True),
        # One process is off by 2e-5 of the largest itself, so that another order of sums may be off by 8e-5.
        ([0.0, 1.00008], [0.0, 1.0], 2e-5, 1e-5, False),
        ([0.0, 1.00008], [0.0, 1.0], 2e-7, 8e-5, False),
        ([], [], 0.0, 0.0, False),
    ],
)
def test_relative_error(found: list[float], expected: list[float], off: float, error: float, noise: bool) -> None:
    result = Closeness().error(*(torch.tensor(one, dtype=torch.float64) for one in (found, expected)), off)
    assert result == (pytest.approx(error, rel=1e-5), noise)


def test_values_in_float64_are_off_by_the_ratio_of_roundings() -> None:
    value, exact = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 2.5])
    assert Closeness.of(None, {torch.float64}).rounding_error(value, exact) == pytest.approx(0.5 * 2.0**-29)
    assert Closeness.of(None).rounding_error(value, exact) == pytest.approx(0.5)
    assert Closeness.of(None).rounding_error(value, torch.tensor([1.0, math.inf])) == 0.0


def test_what_float64_computes_in_another_way_excuses_nothing() -> None:
    """Off by 5% in float64, one gradient of a model is no more equal to 1.05 times itself than all are."""
    weight = torch.ones(2)
    for others, far in ((1.0, 0.5), (1e6, 0.05)):
        alone = {"weight": weight, "other": torch.full((2,), others)}
        exact, found = alone | {"weight": weight * (1 + far)}, alone | {"weight": weight * 1.05}
        assert compare(found, alone, exact, Closeness()).errors["weight"] > 1e-5


def test_what_only_rounding_excuses_is_named() -> None:
    plan, loss, weight = report_with(0.0).plan, torch.tensor(1.0), torch.ones(2)
    alone = OneStep(loss, {"weight": weight, "other": torch.full((2,), 10.0)})
    exact = OneStep(loss, {**alone.gradients, "weight": weight + 2e-5})
    found = OneStep(loss, {**alone.gradients, "weight": weight + 5e-5}, plan=plan)
    report = judge(found, (alone, exact), Closeness(), 0.0, (1,))
    assert report.ok and report.eased == ("weight",) and "by no more than their rounding" in str(report)
    assert not judge(found, (alone, alone), Closeness(), 0.0, (1,)).ok


def test_complex_buffers_stay_complex_in_float64() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turns", torch.polar(torch.ones(2), torch.ones(2)))
    other, batch = _doubled(model, {"x": torch.ones(2)})
    assert torch.equal(other.turns, model.turns) and other.weight.dtype == batch["x"].dtype == torch.float64
    assert _doubled(model.double(), torch.ones(2, dtype=torch.float64))[0].weight.dtype == torch.float32


def test_zeros_are_as_good_as_no_gradient_and_named() -> None:
    weight = torch.ones(2)
    alone = {"weight": weight}
    zeros, other = {"weight": weight, "expert": torch.zeros(3)}, {"weight": weight, "expert": torch.tensor([0.0, 1e-9])}
    found = compare(zeros, alone, None, Closeness())
    assert (found.errors, found.unset) == ({"weight": 0.0, "expert": 0.0}, ("expert",)) and not found.noise
    assert compare(other, alone, None, Closeness()).errors["expert"] == math.inf
    assert compare(alone, zeros, None, Closeness()).errors["expert"] == math.inf
    assert "zeros, where one process leaves None: expert" in str(replace(report_with(0.0), unset=("expert",)))


@pytest.mark.slow
def test_a_model_without_loss_needs_a_loss_function() -> None:
    model, x = nn.Linear(12, 4), torch.randn(8, 12)
    with pytest.raises(TraceError, match="returns no loss"):
        check(model, x)
    assert check(model, x, loss_fn=lambda out: out.pow(2).mean()).ok
    assert check(model, (x,), loss_fn=lambda out, batch: (out.sum(1) - batch[0].sum(1)).pow(2).mean()).ok


@pytest.mark.slow
def test_a_meta_model_gets_weights() -> None:
    with torch.device("meta"):
        model = Stack(layers=1)
    assert check(model, text(4, 8)).ok


def test_a_given_plan_is_the_one_verified() -> None:
    model, batch = plain()
    plan = autopar.plan(model, (2,), batch, cluster=CLUSTER, options=autopar.Options(zero=2))
    report = check(model, batch, plan=plan)
    assert report.ok and report.plan == plan


@pytest.mark.slow
def test_an_axis_of_one_device_and_uneven_sizes() -> None:
    assert check(Stack(layers=1), text(6, 7), (2, 1, 2), options=autopar.Options(zero=3)).ok


class Failing(nn.Module):
    """Does ``what`` on rank 1 of a run on several processes, while being traced."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("WORLD_SIZE") == "2" and os.environ["RANK"] == "1":
            self.fail_here()
        return self.linear(x).sum()

    def fail_here(self) -> None:
        if self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hangs":
            time.sleep(600)
        raise ValueError("the number was seven")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raises", r"(?s)fail_here.*the number was seven|the number was seven"),
        ("killed", r"rank 1 of 2 was killed by SIGKILL"),
        pytest.param("hangs", r"(?s)no result from rank .* within 6 s.*in fail_here", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_it(what: str, message: str) -> None:
    started = time.monotonic()
    # Rank 0, which hears of it, may report first.
    with pytest.raises((WorkerError, TraceError, PlanMismatchError), match=message) as caught:
        autopar.verify(Failing(what), (2,), torch.randn(8, 12), cluster=CLUSTER, timeout=6 if what == "hangs" else 60)
    assert time.monotonic() - started < 40
    if what == "raises":
        shown = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
        assert re.search("rank 1 of (2|the mesh)", shown) and "the number was seven" in shown


class Narrow(nn.Module):
    """Two layers, computed in the dtype of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(33, 40), nn.Linear(40, 17)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.b(torch.tanh(self.a(x))), y)


def test_a_model_in_bf16_is_compared_by_its_own_rounding() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(24, 33).bfloat16(), "y": torch.randint(0, 17, (24,))}
    report = check(Narrow().bfloat16(), batch, options=autopar.Options(layout=autopar.Layout(data=2)))
    assert report.ok, report
    assert report.tolerance == 8 * torch.finfo(torch.bfloat16).eps


def test_outputs_that_transformers_records_are_those_of_the_model() -> None:
    """Its classes note what to record as they construct a model, which ranks do not."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=67, hidden_size=24, intermediate_size=40, moe_intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_experts=4, num_experts_per_tok=2,
        output_router_logits=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 67, (4, 12))
    report = check(Qwen3MoeForCausalLM(config), {"input_ids": ids, "labels": ids}, options=autopar.Options(stages=1))
    assert report.ok, report
