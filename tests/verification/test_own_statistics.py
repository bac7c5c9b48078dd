"""``Options(batch_statistics="microbatch")``: a step is what a loop that accumulates gradients computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.plans.plan import Plan
from autopar.runtime.launch import run_local

BATCH = 12


class Normed(nn.Module):
    """Two batch norms, one of them with a cumulative average; dropout before the head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.average = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=None)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.average(self.second(x)))
        return nn.functional.cross_entropy(self.head(self.dropout(x.mean((2, 3)))), labels)


class Contrastive(nn.Module):
    """Every sample is compared with every other; no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        logits = scale * self.left(x) @ self.right(x).T
        return nn.functional.cross_entropy(logits, torch.arange(x.shape[0]))


def images() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, 3, 5, 7), "labels": torch.arange(BATCH) % 5}


def own(**options: Any) -> autopar.Options:
    return autopar.Options(batch_statistics="microbatch", **options)


def accumulated(model: nn.Module, batch: dict[str, torch.Tensor], count: int, steps: int) -> list[torch.Tensor]:
    """The loop, written plainly; returns the losses."""
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for index in range(count):
            loss = model(**{name: value.chunk(count)[index] for name, value in batch.items()}) / count
            loss.backward()
            total += loss.detach()
        losses.append(total)
    return losses


def trained(rank: int, world: int, options: autopar.Options, steps: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = autopar.parallelize(Normed(), (world,), options=options, cluster="dgx-a100-80gb")
    losses = [model.step(**images()) for _ in range(steps)]
    gradients = {name: model.full_tensor(p.grad) for name, p in model.named_parameters()}
    return losses, gradients, {name: model.full_tensor(buffer) for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    ("world", "stages", "count"),
    [(1, 1, 3), pytest.param(2, 2, 2, marks=pytest.mark.slow), pytest.param(2, 1, 6, marks=pytest.mark.slow)],
)
def test_a_step_is_the_loop(world: int, stages: int, count: int) -> None:
    """Losses, accumulated gradients and running statistics of two steps."""
    torch.manual_seed(0)
    reference = Normed()
    whole = copy.deepcopy(reference)
    expected = accumulated(reference, images(), count, 2)
    options = own(stages=stages, microbatches=count)
    losses, gradients, buffers = run_local(trained, world, timeout=200.0, args=(options, 2))[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-5, atol=1e-6, msg=name)
    assert int(buffers["norm.num_batches_tracked"]) == 2 * count
    assert abs(accumulated(whole, images(), 1, 1)[0] - expected[0]) > 1e-4, "the whole batch has another loss"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "dropout"),
    [
        ((1,), {"stages": 1, "microbatches": 6}, 0.0),
        ((2,), {"stages": 1, "microbatches": 3}, 0.0),
        ((2,), {"stages": 2, "microbatches": 3, "schedule": "zb-h1"}, 0.0),
        ((2, 2), {"stages": 2, "microbatches": 2}, 0.0),
        ((2,), {"stages": 2, "microbatches": 2}, 0.4),
        ((2,), {"stages": 1, "microbatches": 3, "precision": "bf16"}, 0.0),
    ],
)
def test_verify_compares_with_the_loop(mesh: tuple[int, ...], options: dict[str, Any], dropout: float) -> None:
    report = autopar.verify(Normed(dropout), mesh, images(), options=own(**options), cluster="dgx-a100-80gb", steps=2)
    assert report.ok and not report.unpriced, str(report)
    assert report.plan.pipeline is not None and report.plan.pipeline.own_statistics
    assert any("running_mean" in name for name in report.later_errors)


@pytest.mark.slow
def test_samples_that_are_compared() -> None:
    batch = (torch.randn(8, 6),)
    report = autopar.verify(Contrastive(), (2,), batch, options=own(stages=2, microbatches=2), cluster="dgx-a100-80gb")
    assert report.ok, str(report)
    again = autopar.verify(Contrastive(), (2,), batch, plan=report.plan)
    assert again.ok, "a plan that is given decides, whatever the options"


def planned(model: nn.Module, batch: Any, options: autopar.Options) -> Plan:
    return autopar.plan(model, (2,), batch, options=options, cluster="dgx-a100-80gb")


def test_the_plan_says_so() -> None:
    found = planned(Normed(), images(), own(stages=2, microbatches=2))
    assert "batch statistics are those of each microbatch" in str(found)
    assert Plan.from_json(found.to_json()) == found == Plan.from_text(found.to_text())
    one = planned(Normed(), images(), own(stages=2, microbatches=1))
    assert "batch statistics" not in str(one)
    changes = {change.path: (change.before, change.after) for change in one.diff(found).settings}
    assert changes["batch_statistics"] == ("batch", "microbatch")


def test_models_without_statistics_are_not_affected() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    for options in (own(stages=2, microbatches=2), autopar.Options(stages=2, microbatches=2)):
        found = autopar.plan(model, (2,), torch.randn(8, 6), options=options, loss_fn=lambda out: out.square().mean())
        assert found.pipeline is not None and not found.pipeline.own_statistics


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(autopar.OptionsError, match=r'couples the samples.*Options\(batch_statistics="microbatch"\)'):
        planned(Normed(), images(), autopar.Options(stages=2, microbatches=2))
    halves = autopar.Options(layout=autopar.Layout(data=2, microbatch=BATCH // 4))
    said = rf"Layout\(microbatch={BATCH // 4}\), which makes 2 microbatches.* use microbatch={BATCH // 2} \(all"
    with pytest.raises(autopar.OptionsError, match=said):
        planned(Normed(), images(), halves)
    with pytest.raises(autopar.OptionsError, match="microbatches of 1 samples would be batches of their own"):
        planned(Normed(), images(), own(microbatches=BATCH, stages=1))
    with pytest.raises(
        autopar.OptionsError, match="batch_statistics='sync' is not known; one of 'batch', 'microbatch'"
    ):
        autopar.Options(batch_statistics="sync")  # type: ignore[arg-type]
