"""Targets that only the loss sees, and losses of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import OptionsError, TraceError
from autopar.trace.loss import call_loss, run_with_loss
from autopar.trace.tracer import trace
from tests.helpers.planning import CLUSTER, on, slow_devices
from tests.runtime.test_kinds_of_calls import Flagged, batch, check_gradients, check_own_loss, check_step, pair


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.up(x)).relu())


def two_parts(output: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, targets["classes"]) + (output.sum(-1) * targets["weight"]).mean()


Loss = Callable[..., torch.Tensor]
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), label_smoothing=0.1)


@pytest.mark.parametrize(
    ("loss_fn", "mesh", "named"),
    [
        pytest.param(WEIGHTED, (2,), {}, marks=pytest.mark.slow),
        (two_parts, (2,), {}),
        pytest.param(F.cross_entropy, (2, 2), {}, marks=pytest.mark.slow),
        pytest.param(two_parts, (2, 2), {"precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=["module", "tree", "2x2", "bf16"],
)
def test_targets_reach_the_loss(loss_fn: Loss, mesh: tuple[int, ...], named: dict[str, Any]) -> None:
    """Batch norm and means over the batch: a smaller batch has statistics of its own."""

    def work(rank: int, world: int) -> None:
        reference, x = Classifier(), torch.randn(12, 6)
        classes: Any = torch.randint(0, 5, (12,))
        given = {"classes": classes, "weight": torch.randn(12)} if loss_fn is two_parts else classes
        options = autopar.Options(mesh_search=False, **named)
        model = autopar.parallelize(
            copy.deepcopy(reference), mesh, cluster=slow_devices(), options=options, loss_fn=loss_fn
        )
        for size in (12, 7):
            some = {k: v[:size] for k, v in given.items()} if isinstance(given, dict) else given[:size]
            with torch.autocast("cpu", torch.bfloat16, enabled="precision" in named):
                loss = loss_fn(reference(x[:size]), some)
            loss.backward()
            close = {"rtol": 3e-2, "atol": 3e-2} if "precision" in named else {}
            torch.testing.assert_close(model.step(x[:size], targets=some), loss.detach(), **close)
            if "precision" not in named:
                check_gradients(model, reference)
                torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))

    on(4 if mesh != (2,) else 2, work, timeout=500.0)


@pytest.mark.slow
def test_targets_under_stages_and_in_verify() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    x, classes = torch.randn(8, 6), torch.randint(0, 5, (8,))
    for options in (autopar.Options(stages=2, microbatches=2), autopar.Options(zero=3)):
        report = autopar.verify(
            model, (2,), x, targets=classes, loss_fn=nn.CrossEntropyLoss(), options=options, cluster=CLUSTER
        )
        assert report.ok, str(report)


def test_a_loss_of_ones_own_whatever_else_there_is() -> None:
    """With a loss function set; beside a loss that the model returns; after steps; with random numbers and counters."""

    def work(rank: int, world: int) -> None:
        model, reference = pair((2,), loss_fn=two_parts)
        for side in (model, reference):
            side.drop.p = 0.0
        check_own_loss(model, reference, ids=batch()["ids"])
        model, reference = pair((2,))
        check_step(model, reference, **batch())
        for given in (batch(), batch(), batch(5)):
            check_own_loss(model, reference, **given)
        check_step(model, reference, **batch())

    on(2, work, timeout=400.0)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4, momentum=0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.linear(self.drop(self.norm(x)))
        return {"loss": hidden.square().mean(), "hidden": hidden, "double": hidden * 2}


def test_the_forward_that_is_run_again_draws_the_same_numbers_and_changes_nothing() -> None:
    def work(rank: int, world: int) -> None:
        reference, x = Drawing(), torch.randn(8, 4)
        models = [autopar.parallelize(copy.deepcopy(reference), (1,), options=autopar.Options(seed=3)) for _ in "ab"]
        by_loss, by_output = models
        for _ in range(2):
            by_loss(x)["loss"].backward()
            by_output(x)["hidden"].square().mean().backward()
        for one, other in zip(by_loss.parameters(), by_output.parameters(), strict=True):
            torch.testing.assert_close(by_output.full_tensor(other.grad), by_loss.full_tensor(one.grad))
        torch.testing.assert_close(dict(by_output.named_buffers()), dict(by_loss.named_buffers()))
        assert by_output.random_state() == by_loss.random_state()

    on(1, work)


def test_what_targets_and_losses_must_be() -> None:
    model, x, y = nn.Linear(4, 4), torch.randn(3, 4), torch.randn(3, 4)

    def loss_of(loss_fn: Loss | None, model: nn.Module = model, **kwargs: Any) -> torch.Tensor | None:
        return run_with_loss(model, loss_fn, (x,), kwargs)[1]

    plain = (model(x) - y).square().mean()
    for loss_fn in (nn.MSELoss(), F.mse_loss, lambda out, y: (out - y).square().mean()):
        torch.testing.assert_close(loss_of(loss_fn, targets=y), plain)
    with pytest.raises(TraceError, match=r"forward takes no such input and there is no loss_fn"):
        loss_of(None, targets=y)
    with pytest.raises(TraceError, match=r"MSELoss compares the output with targets, but none are given"):
        loss_of(nn.MSELoss())
    with pytest.raises(TraceError, match=r"takes the output alone: give it a second parameter"):
        loss_of(lambda out: out.sum(), targets=y)
    with pytest.raises(TraceError, match=r"takes the output and the batch"):
        loss_of(lambda out, batch: out.sum(), targets=y)
    with pytest.raises(TraceError, match=r"PoissonNLL.*parameters of its own \(scale\)"):
        learnt = nn.PoissonNLLLoss()
        learnt.scale = nn.Parameter(torch.ones(()))
        loss_of(learnt, targets=y)
    with pytest.raises(OptionsError, match="give one of them"):
        autopar.plan(model, (1,), {"input": x, "targets": y}, targets=y, loss_fn=nn.MSELoss(), cluster=CLUSTER)


class Own(nn.Module):
    """Takes targets itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) - targets).square()


def test_targets_of_a_models_own_go_to_the_model() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    losses: list[Loss] = [lambda out: out.mean(), lambda out, batch: out.mean() + 0 * batch[0].sum()]
    for loss_fn in losses:
        traced = trace(Own(), (x,), {"targets": y}, device="cpu", loss_fn=loss_fn)
        assert traced.signature.loss == "loss" and "targets" in traced.signature.input_names
    assert trace(Own(), (x,), {"targets": y}, device="cpu").signature.output_names == ("0",)


class OfBatch(nn.Module):
    def forward(self, output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (output - batch[0]).square().mean()


def test_a_loss_that_is_a_module_gets_the_batch_by_that_name() -> None:
    x, output = torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(call_loss(OfBatch(), output, (x,), {}), (output - x).square().mean())


@pytest.mark.slow
def test_a_flagged_model_has_no_loss_without_labels() -> None:
    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(Flagged(), (1,), cluster=CLUSTER)
        with pytest.raises(autopar.AutoparError, match=r"step\(..., targets=...\), loss_fn\(output, targets\)"):
            model.step(batch()["ids"])

    on(1, work)
