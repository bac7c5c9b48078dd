"""Gradients that cancel very far, and buffers that are zero but for rounding: verify measures how much of them rounding
is, and still finds the errors of plans there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.verification.gradients import Comparison, compare
from autopar.verification.later_steps import LaterErrors, LaterSteps, compare_later
from autopar.verification.perturbation import ranges
from autopar.verification.report import Report
from autopar.verification.tolerance import APART, MOST_MOVED, MOST_OF_NOISE, TOLERANCE, Closeness
from tests.helpers.planning import CLUSTER

Tensors = dict[str, torch.Tensor]


def _wrong(errors: Comparison | LaterErrors) -> list[str]:
    return [name for name, error in errors.errors.items() if not error <= TOLERANCE]


def _step(shards: int, weak: float) -> Callable[[Tensors, torch.Tensor], Tensors]:
    """Gradients of a network whose bias ``b`` is before a norm, so that it cancels, and after that counts a little:
    ``weak``. Two terms of it, summed over ``shards`` of the batch."""

    def gradients(state: Tensors, x: torch.Tensor) -> Tensors:
        own = {name: value.clone().requires_grad_() for name, value in state.items()}
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for part in x.chunk(shards):
            hidden = part @ own["w"] + own["b"]
            hidden = hidden - hidden.mean(1, keepdim=True)
            hidden = hidden / (hidden.square().mean(1, keepdim=True) + 1e-5).sqrt()
            direct = weak * (own["b"] * part.square().mean((1, 2))[:, None]).sum()
            loss = ((hidden @ own["v"]).tanh().square().sum() + direct) / len(x)
            for name, gradient in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
                total[name] += gradient
        return total

    return gradients


@given(
    seed=st.integers(0, 2**32),
    double=st.booleans(),
    shards=st.sampled_from([2, 4]),
    luck=st.sampled_from([1.0, 0.3]),
    weak=st.sampled_from([1e-3, 1e-4, 1e-5, 1e-6]),
    fault=st.sampled_from(["a thousandth", "a term", "a rank", "nothing", "twice"]),
)
@settings(deadline=None, max_examples=200)
def test_rounding_is_equal_and_faults_are_not(
    seed: int, double: bool, shards: int, luck: float, weak: float, fault: str
) -> None:
    """Whatever is lost, beyond what rounding itself does, of a gradient that is rounding in part; however much of it
    one process has, by ``luck``."""
    dtype, other = (torch.float64, torch.float32) if double else (torch.float32, torch.float64)
    closeness, unit = Closeness(double=double), torch.finfo(dtype).eps
    weak = weak * (unit / torch.finfo(torch.float32).eps)
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (5, 6), "b": (6,), "v": (6, 6)}
    state = {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()}
    x = torch.randn(8, 16, 5, generator=generator).to(dtype)
    precise = _step(1, weak)({key: value.to(other) for key, value in state.items()}, x.to(other))
    exact = {key: value.double() for key, value in precise.items()}
    alone, step = _step(1, weak)(state, x), _step(shards, weak)
    best = exact if not double else alone
    alone = {key: best[key] + luck * (value - best[key]) for key, value in alone.items()}
    alone = {key: value.to(dtype) for key, value in alone.items()}
    planned, moved = step(state, x), ranges(step, state, x, unit)

    def judged(found: Tensors) -> list[str]:
        first = compare(found, alone, exact, closeness)
        return _wrong(compare(found, alone, exact, closeness, {name: moved[name] for name in first.doubtful}))

    size, own = float(alone["b"].abs().max()), closeness.rounding_error(alone["b"], exact["b"])
    assert judged(planned) == [] or APART * moved["b"] > MOST_MOVED * size, "which rounding moves too far to be known"
    b = planned["b"]
    cancelled = step(state, x)["b"] - _step(shards, 0.0)(state, x)["b"]
    found = {
        "a thousandth": b * 1.001,
        "a term": b - cancelled,
        "a rank": b - cancelled / shards,
        "nothing": b * 0,
        "twice": b * 2,
    }[fault]
    is_lost = fault in ("nothing", "twice") and size > MOST_OF_NOISE * own
    if is_lost or float((found - b).abs().max()) > max(12 * (moved["b"] + own), 2 * TOLERANCE * size):
        assert "b" in judged(planned | {"b": found})


def test_a_gradient_that_cancels_is_measured_where_rounding_may_explain_it() -> None:
    alone = {"w": torch.ones(2), "b": torch.full((2,), 1e-4)}
    exact = {"w": torch.ones(2).double(), "b": torch.full((2,), 1e-4 + 8e-8).double()}

    def found(off: float, moved: float | None, known: Tensors | None = exact) -> tuple[tuple[str, ...], list[str]]:
        result = compare(
            alone | {"b": alone["b"] + off}, alone, known, Closeness(), None if moved is None else {"b": moved}
        )
        return result.doubtful, _wrong(result)

    assert found(1e-7, None) == (("b",), ["b"]), "not known yet"
    assert found(1e-7, 4e-8) == ((), []) and found(1e-7, 1e-8) == (("b",), ["b"])
    for endless in (math.inf, math.nan):
        assert found(1e-7, endless) == (("b",), ["b"])
    assert found(4e-6, 1.0) == ((), ["b"]), "fifty times the rounding of one process"
    assert found(1e-7, 1.0, None) == ((), ["b"]), "whose rounding is not known"
    exact["b"] = exact["b"] + 1e-6
    assert found(1.2e-5, 1.0) == ((), ["b"]), "more than the tolerance of the largest"


def test_a_parameter_may_be_moved_as_its_gradient_is() -> None:
    """By so much in each of several steps: a gradient of 1e-4, of which rounding moves 3e-7."""
    start = {"b": torch.zeros(2)}
    alone, exact = {"b": torch.full((2,), 2e-7)}, {"b": torch.full((2,), 2e-7 + 1.6e-10).double()}
    losses = (torch.ones(()), torch.ones(()))

    def error(off: float, moved: float | None) -> float:
        found = LaterSteps(losses, {}, start, {"b": alone["b"] + off})
        known = LaterSteps(losses, {}, start, alone), LaterSteps(losses, {}, start, exact)
        return compare_later(found, *known, Closeness(), moved=None if moved is None else {"b": moved}).errors[
            "parameter b after 2 steps"
        ]

    assert error(1.2e-9, None) > TOLERANCE >= error(1.2e-9, 3e-7)
    assert error(1e-7, 1.0) > TOLERANCE and error(1.2e-9, math.inf) > TOLERANCE


def test_a_buffer_that_is_rounding_is_measured() -> None:
    alone = {"mean": torch.full((2,), 2.3e-17), "settled": torch.full((2,), 4.4e-10), "var": torch.ones(2)}
    exact = {"mean": torch.full((2,), 1e-26).double(), "settled": alone["settled"].double() + 4.6e-15}
    exact["var"] = torch.ones(2).double() + 1e-8
    alone["mask"] = exact["mask"] = torch.full((2,), -math.inf)

    def found(name: str, off: float, moved: float | None = None, known: bool = True) -> tuple[bool, bool]:
        """Whether it is in doubt, and whether it is equal."""
        changed = alone | {name: alone[name] + off}
        errors = compare_later(
            LaterSteps((), changed),
            LaterSteps((), alone),
            LaterSteps((), exact) if known else None,
            Closeness(),
            moved=None if moved is None else {name: moved},
        )
        return name in errors.doubtful, _wrong(errors) == []

    assert found("mean", 1.9e-16) == (True, False)
    assert found("mean", 1.9e-16, 1e-16) == (False, True) and found("mean", 1.9e-16, 1e-17) == (True, False)
    assert found("settled", 2.9e-14) == (True, False) and found("settled", 2.9e-14, 1e-14) == (False, True)
    assert found("settled", 4.4e-13, 1.0) == (False, False), "by a thousandth"
    assert found("mean", 2e-5, 1.0) == (False, False), "more than the tolerance of the largest"
    assert found("var", 1e-3, 1.0) == (False, False) and found("mean", 1.9e-16, 1.0, known=False) == (False, False)
    for endless in (math.inf, math.nan):
        assert found("mean", 1.9e-16, endless) == (True, False)


class Centred(nn.Module):
    """Keeps the mean of what it has centred, which is rounding: on one process far less than under a plan, as where a
    kernel sums in float64. ``slip``: what is added to it under a plan."""

    def __init__(self, slip: float) -> None:
        super().__init__()
        self.linear, self.slip = nn.Linear(6, 8), slip
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("square", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        hidden = hidden - hidden.mean(0)
        planned = int(os.environ.get("WORLD_SIZE", "1")) > 1
        mean = hidden.detach().mean(0)
        self.mean.copy_(mean + self.slip if planned else mean * 1e-4)
        self.square.copy_(hidden.detach().square().mean(0))
        return hidden.tanh().square().mean()


def _verified(slip: float) -> Report:
    options = autopar.Options(layout=autopar.Layout(data=2))
    return autopar.verify(Centred(slip), (2,), torch.randn(24, 6), cluster=CLUSTER, options=options)


def test_a_mean_of_what_is_centred_is_known_to_be_rounding() -> None:
    report = _verified(0.0)
    assert report.ok and not report.unmeasured, report


@pytest.mark.slow
def test_an_error_of_a_plan_there_is_no_rounding() -> None:
    report = _verified(5e-7)
    assert not report.ok and not report.unmeasured
    assert [name for name, error in report.later_errors.items() if error > report.tolerance] == ["buffer mean"]
