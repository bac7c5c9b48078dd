"""Gradients that are nothing but rounding: verify knows them on processes, says so, and still finds the errors of plans
there."""

from __future__ import annotations

import importlib
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import autopar
from autopar.cluster.description import Cluster
from autopar.errors import WorkerError
from autopar.runtime.launch import run_local
from autopar.verification.gradients import Comparison, compare
from autopar.verification.later_steps import LaterSteps, compare_later
from autopar.verification.perturbation import SAMPLES, moved_by_rounding, perturbed, ranges
from autopar.verification.report import OneStep, Report, judge
from autopar.verification.steps import Task, whole_gradients
from autopar.verification.tolerance import Closeness
from tests.helpers.planning import CLUSTER

Gradients = dict[str, torch.Tensor]
EPS = torch.finfo(torch.float32).eps


class Lucky(torch.autograd.Function):
    """The identity, whose gradient is a thousand millionth: as of a kernel that is lucky with its rounding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1e-9


class Pooled(nn.Module):
    """A bias before a norm, whose gradient is nothing but rounding: on one process far less than under a plan, as where
    a kernel sums in float64. ``slip``: what is added to it under a plan."""

    def __init__(self, slip: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True)
        self.head, self.slip = nn.Linear(8, 1), slip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        planned, bias = int(os.environ.get("WORLD_SIZE", "1")) > 1, self.conv.bias
        hidden = F.conv2d(x, self.conv.weight, padding=1) + (bias if planned else Lucky.apply(bias))[:, None, None]
        loss = self.head(self.norm(hidden).tanh().mean((2, 3))).sigmoid().mean()
        return loss + self.slip * (bias - bias.detach()).sum() if planned else loss


def _verified(slip: float) -> Report:
    return autopar.verify(
        Pooled(slip),
        (2,),
        torch.randn(4, 3, 4, 4),
        cluster=CLUSTER,
        options=autopar.Options(layout=autopar.Layout(data=2)),
    )


def test_a_bias_before_a_norm_is_known_to_be_rounding() -> None:
    report = _verified(0.0)
    noise = report.noise["conv.bias"]
    assert report.ok, report
    assert noise.moved is not None and 100 * noise.alone < noise.planned
    text = str(report)
    assert "zero but for rounding (largest elements on one process and under the plan)" in text
    line = next(line for line in text.splitlines() if line.startswith("  conv.bias"))
    assert f"{noise.alone:.1e}" in line and f"{noise.planned:.1e}" in line and f"moved {noise.moved:.1e}" in line


@pytest.mark.slow
def test_an_error_of_a_plan_there_is_no_rounding() -> None:
    """Of a millionth of the largest gradient, which nothing else shows."""
    report = _verified(5e-7)
    noise = report.noise["conv.bias"]
    assert not report.ok and noise.moved is not None and noise.moved < 1e-7 < noise.planned
    assert [name for name, error in report.gradient_errors.items() if error > report.tolerance] == ["conv.bias"]
    assert "zero but for rounding on one process, too far from that under the plan" in str(report)


@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(1, SAMPLES))
@settings(deadline=None, max_examples=50)
def test_perturbed_values_differ_by_a_unit_of_rounding(seed: int, dtype: torch.dtype, number: int) -> None:
    generator, unit = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps
    value = (torch.randn(20, 30, generator=generator) * 10).to(dtype)
    value[0] = value[0].round()
    found = perturbed(value, unit, number)
    moved = (found.double() / value.double() - 1).nan_to_num()
    assert found.dtype == dtype and float(moved.min()) >= 0.0 and float(moved.max()) <= 2 * unit
    assert 0.3 < float((moved[1:] > 0).double().mean()) < 0.7 and torch.equal(found[0], value[0])
    assert torch.equal(perturbed(value[3:, 7:].clone(), unit, number), found[3:, 7:])
    assert not torch.equal(perturbed(value, unit, number + 1), found)
    assert torch.equal(perturbed(value[0].long(), unit, number), value[0].long())


def _step(shards: int, kind: str) -> Callable[[Gradients, torch.Tensor], Gradients]:
    """Gradients of a small network, of which the bias ``b`` has none in exact arithmetic, summed by ``shards``."""

    def gradients(state: Gradients, x: torch.Tensor) -> Gradients:
        own = {name: value.clone().requires_grad_() for name, value in state.items()}
        parts = [x] if kind == "batch" else x.chunk(shards)
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for part in parts:
            hidden = part @ own["w"] + own["b"]
            if kind == "softmax":
                hidden = (part @ own["v"] @ hidden.mT).softmax(-1) @ part
            else:
                dims = (0, 1) if kind == "batch" else (1,)
                hidden = hidden - hidden.mean(dims, keepdim=True)
                hidden = hidden / (hidden.square().mean(dims, keepdim=True) + 1e-5).sqrt()
            loss = (hidden @ own["v"]).tanh().square().sum() / len(x)
            for name, gradient in zip(
                own, torch.autograd.grad(loss, list(own.values()), allow_unused=True), strict=True
            ):
                total[name] += 0 if gradient is None else gradient
        return total

    return gradients


def _judged(alone: Gradients, planned: Gradients, exact: Gradients, moved: dict[str, float]) -> Comparison:
    first = compare(planned, alone, exact, Closeness())
    return compare(planned, alone, exact, Closeness(), {name: moved[name] for name in first.doubtful})


def _wrong(comparison: Comparison) -> list[str]:
    return [name for name, error in comparison.errors.items() if not error <= Closeness().tolerance]


@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["instance", "batch", "softmax"]),
    shards=st.sampled_from([2, 4]),
    luck=st.sampled_from([1.0, 1e-3, 1e-6, 0.0]),
    fault=st.sampled_from(["half", "nothing", "one shard", "slip", "large"]),
    name=st.sampled_from("wvb"),
)
@settings(deadline=None, max_examples=150)
def test_rounding_is_equal_and_faults_are_not(
    seed: int, kind: str, shards: int, luck: float, fault: str, name: str
) -> None:
    """Whatever is lost of a gradient that is not zero, and what is too much or too steady for one that is; however
    little rounding one process has, by ``luck``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (5, 6), "b": (6,), "v": (5, 6) if kind == "softmax" else (6, 6)}
    state = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    x = torch.randn(8, 16, 5, generator=generator)
    doubled = {key: value.double() for key, value in state.items()}
    exact, alone = _step(1, kind)(doubled, x.double()), _step(1, kind)(state, x)
    alone["b"] = alone["b"] * luck
    step = _step(shards, kind)
    planned, moved = step(state, x), ranges(step, state, x, EPS)
    right = _judged(alone, planned, exact, moved)
    assert _wrong(right) == []
    largest = max(float(gradient.abs().max()) for gradient in alone.values())
    rounding = moved["b"] + float((alone["b"] - exact["b"]).abs().max())
    faulty = {
        "half": planned[name] / 2,
        "nothing": planned[name] * 0,
        "one shard": planned[name] + alone[name].flip(0),
        "slip": planned[name] + (5e-6 * largest + 12 * rounding if name == "b" else 2e-4 * largest),
        "large": planned[name] + 1e-3 * largest,
    }[fault]
    # A part of what is nothing but rounding is as good as the whole.
    harmless = name == "b" and fault in ("half", "nothing", "one shard")
    assert _wrong(_judged(alone, planned | {name: faulty}, exact, moved)) == ([] if harmless else [name])


def test_rounding_is_small_and_finite() -> None:
    """However much rounding is said to move a gradient, it does not explain a large one, nor ranks that disagree."""
    alone = {"w": torch.ones(2), "b": torch.full((2,), 1e-14)}
    exact = alone | {"b": torch.zeros(2)}
    for off, wrong in ((1e-9, []), (0.9e-5, []), (1.2e-5, ["b"]), (math.inf, ["b"]), (math.nan, ["b"])):
        planned = alone | {"b": torch.tensor([off, 0.0])}
        assert _wrong(_judged(alone, planned, exact, {"b": 1.0})) == wrong
    # Ranks that disagreed while it was measured, or values without an end, tell nothing of it.
    planned = alone | {"b": torch.tensor([0.9e-5, 0.0])}
    for far in (math.inf, math.nan):
        found = compare(planned, alone, exact, Closeness(), {"b": far})
        assert _wrong(found) == ["b"] and found.noise["b"].moved is None
    # Nothing is known of a model that does not run in float64.
    assert compare(alone | {"b": torch.tensor([1e-9, 0.0])}, alone, None, Closeness()).doubtful == ()


def test_what_cannot_be_measured_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object, **__: object) -> None:
        raise WorkerError("rank 1 died\n" + "of this or that\n" * 100)

    module = importlib.import_module("autopar.verification.verify")
    monkeypatch.setattr(module, "run_local", dies)
    task = Task(nn.Linear(1, 1), (2,), (), None, autopar.Options(), CLUSTER, None, None)
    moved, why = module._moved(task, ("b",), Closeness(), 1.0)
    assert moved == {} and why.startswith("rank 1 died") and len(why) <= 200
    monkeypatch.setattr(module, "run_local", lambda *_, **__: [{"b": math.inf, "w": 1e-9}])
    assert "b" in module._moved(task, ("b", "w"), Closeness(), 1.0)[1]
    assert module._moved(task, ("w",), Closeness(), 1.0)[1] == module._moved(task, (), Closeness(), 1.0)[1] == ""
    alone = {"w": torch.ones(2), "b": torch.full((2,), 1e-14)}
    planned = alone | {"b": torch.full((2,), 1e-9)}
    found = compare(planned, alone, alone | {"b": torch.zeros(2)}, Closeness(), {})
    assert _wrong(found) == ["b"] and found.noise["b"].moved is None


def test_a_report_says_why_nothing_was_measured() -> None:
    plan = autopar.plan(nn.Linear(4, 4), (1,), torch.randn(4, 4), cluster=CLUSTER, loss_fn=torch.sum)
    report = Report(plan, 1e-5, 1.0, 0.0, {"b": 1.0}, {}, 1.0, 0.1, unmeasured="rank 1 died")
    assert "not measured: rank 1 died" in str(report)
    assert "not measured" not in str(replace(report, unmeasured=""))


def test_only_gradients_in_doubt_are_gathered() -> None:
    gathered: list[torch.Tensor] = []

    def whole(gradient: torch.Tensor) -> torch.Tensor:
        gathered.append(gradient)
        return gradient

    parameters = {name: nn.Parameter(torch.ones(2)) for name in "wvb"}
    for parameter in parameters.values():
        parameter.grad = torch.ones(2)
    parallel: Any = SimpleNamespace(named_parameters=parameters.items, full_tensor=whole)
    assert list(whole_gradients(parallel, 1, ("b",))) == ["b"] and len(gathered) == 1
    assert list(whole_gradients(parallel, 1)) == list("wvb")


class Versioned(nn.Linear):
    """Refuses a state that does not say which version of it wrote that."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version") != self._version:
            raise ValueError(f"written by version {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_of_modules_stay_where_values_are_perturbed() -> None:
    model = nn.Sequential(Versioned(3, 2))
    task = Task(model, (1,), (torch.randn(4, 3),), None, autopar.Options(), Cluster.get(CLUSTER), torch.sum, None)
    found = run_local(moved_by_rounding, 1, timeout=60.0, args=(task, EPS, ("0.weight",)))[0]
    assert found.keys() == {"0.weight"} and 0.0 < found["0.weight"] < 1e-4


def test_parametrized_weights_divide_their_batch() -> None:
    """Whose modules are of classes made for them alone, which ranks are sent."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(8, 4))
    )
    options = autopar.Options(layout=autopar.Layout(data=2))
    report = autopar.verify(
        model, (2,), torch.randn(8, 6), cluster=CLUSTER, options=options, loss_fn=lambda out: out.square().mean()
    )
    assert report.ok and not report.divides_nothing, report
    assert any("original1" in name for name in report.gradient_errors)


def test_samples_are_dropped_as_they_come() -> None:
    """But for the least and the most of every element, and whatever is being compared with them."""
    samples: list[weakref.ref[torch.Tensor]] = []

    def gradients(state: torch.Tensor, inputs: None) -> Gradients:
        assert sum(sample() is not None for sample in samples) <= 1
        sample = torch.full((3,), [2.0, 5.0, 1.0][len(samples) % 3])
        samples.append(weakref.ref(sample))
        return {"b": sample}

    assert ranges(gradients, torch.ones(2), None, EPS) == {"b": 4.0} and len(samples) == 1 + SAMPLES


def test_a_gradient_of_exact_zeros_may_be_rounding_under_a_plan() -> None:
    alone = {"w": torch.ones(2), "b": torch.zeros(2)}
    planned = alone | {"b": torch.tensor([1e-9, 0.0])}
    assert compare(planned, alone, alone, Closeness()).doubtful == ("b",)
    assert _wrong(_judged(alone, planned, alone, {"b": 1e-9})) == []
    assert _wrong(_judged(alone, planned, alone, {"b": 1e-12})) == ["b"]


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_parameters_that_only_rounding_moves_are_compared_with_the_others(start: float) -> None:
    """A bias of zeros before a norm is what rounding makes of it, on one process and under a plan."""
    weight = torch.ones(2)
    before = {"w": weight, "b": torch.full((2,), start)}

    def steps(change: float, most: float = 0.1) -> LaterSteps:
        bias = before["b"] + torch.tensor([change, 0.0])
        return LaterSteps((), before=before, parameters={"w": weight + most, "b": bias})

    def error(found: LaterSteps, reference: LaterSteps, exact: LaterSteps, *noisy: str) -> float:
        return compare_later(found, reference, exact, Closeness(), noisy).errors["parameter b after 0 steps"]

    alone, exact, far = steps(1e-17), steps(1e-26), steps(1e-10)
    assert error(far, alone, exact, "b") < 1e-5 < error(steps(1e-5), alone, exact, "b")
    assert (error(far, alone, exact) > 1e-5) == (start == 0.0)  # What rounds to nothing in 0.3 is equal anyway.
    # Only its first gradient is rounding: it must change as on one process, however much others change.
    assert error(steps(0.0, 100.0), steps(9e-4, 100.0), steps(9e-4, 100.0), "b") > 1e-2


def test_a_report_counts_no_rounding_of_rounding() -> None:
    """The distance of one process from float64 is said of gradients that are more than rounding."""
    plan = autopar.plan(nn.Linear(4, 4), (1,), torch.randn(4, 4), cluster=CLUSTER, loss_fn=torch.sum)
    loss, weight = torch.tensor(1.0), torch.ones(2)
    alone = OneStep(loss, {"w": weight * 1.01, "b": torch.full((2,), 1e-4)}, plan=plan)
    exact = OneStep(loss, {"w": weight, "b": torch.full((2,), 1e-20)})
    report = judge(alone, (alone, exact), Closeness.of("bf16"), 0.0)
    assert report.ok and report.noisy == ("b",) and report.rounding == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_that_float64_does_not_find_to_be_small_is_no_rounding() -> None:
    """Of which 16 bits lose a third: that is what the report tells of the rounding, and it is no noise."""
    plan = autopar.plan(nn.Linear(4, 4), (1,), torch.randn(4, 4), cluster=CLUSTER, loss_fn=torch.sum)
    alone = OneStep(torch.tensor(1.0), {"w": torch.ones(2)}, plan=plan)
    for value, noisy, far in ((1.5, (), 1 / 3), (0.1, ("w",), 0.0)):
        exact = OneStep(torch.tensor(1.0), {"w": torch.full((2,), value)})
        report = judge(alone, (alone, exact), Closeness.of("bf16"), 0.0)
        assert report.ok and report.noisy == noisy and report.rounding == pytest.approx(far)
