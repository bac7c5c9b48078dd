"""Deep copies of a parallel model, as averages of weights make them, against the same on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.runtime import run_local

SHARDED, STAGED = autopar.Options(zero=3), autopar.Options(stages=2, microbatches=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.up.weight
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x).tanh())) * self.factor


def _same(model: nn.Module, wanted: nn.Module, whole: autopar.runtime.ParallelModule) -> None:
    pairs = zip(model.named_parameters(), wanted.parameters(), strict=True)
    for (name, found), expected in pairs:
        torch.testing.assert_close(
            whole.full_tensor(found), expected.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def _average(model: nn.Module, *, one_by_one: bool) -> AveragedModel:
    """Under stages, torch's functions over lists of tensors leave those of other stages out, which is warned of."""
    if one_by_one:
        return AveragedModel(model, avg_fn=lambda average, new, count: 0.8 * average + 0.2 * new)
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


@pytest.mark.filterwarnings("ignore:parameters of this copy lie on different pipeline stages")
@pytest.mark.parametrize(
    ("options", "early"),
    [
        (SHARDED, True),
        (STAGED, False),
        pytest.param(SHARDED, False, marks=pytest.mark.slow),
        pytest.param(STAGED, True, marks=pytest.mark.slow),
    ],
    ids=["sharded, before the first batch", "staged, afterwards", "sharded, afterwards", "staged, before"],
)
def test_an_average_of_weights(options: autopar.Options, early: bool) -> None:
    def work(rank: int, world: int) -> None:
        torch.manual_seed(rank)
        plain, reference = Net(), Net()
        torch.manual_seed(0)
        batch = torch.randn(8, 6)
        model = autopar.parallelize(plain, (2,), options=options, loss_fn=lambda out: out.square().mean())
        with model.full_params() as original:
            reference.load_state_dict(original.state_dict())
        if not early:
            model.step(batch), model.zero_grad()
        sides: list[nn.Module] = [model, reference]
        averages = [_average(side, one_by_one=options is STAGED) for side in sides]
        optimizers = [model.optimizer(torch.optim.SGD, lr=0.5), torch.optim.SGD(reference.parameters(), lr=0.5)]
        for _ in range(3):
            model.step(batch), reference(batch).square().mean().backward()
            for average, side, optimizer in zip(averages, sides, optimizers, strict=True):
                optimizer.step(), optimizer.zero_grad(), average.update_parameters(side)
        _same(model, reference, model)
        _same(averages[0].module, averages[1].module, averages[0].module)
        with torch.no_grad():
            for side in averages:
                side.eval()
            torch.testing.assert_close(averages[0](batch), averages[1](batch), rtol=1e-5, atol=1e-6)
            averages[0].module.factor = averages[1].module.factor = 3.0  # The copy's own.
            torch.testing.assert_close(averages[0](batch), averages[1](batch), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(model.eval()(batch), reference.eval()(batch), rtol=1e-5, atol=1e-6)

    run_local(work, 2, timeout=120)


def test_a_copy_trains_by_itself() -> None:
    model = autopar.parallelize(Net(), 1, loss_fn=lambda out: out.square().mean())
    batch = torch.randn(8, 6)
    model.step(batch)
    model.zero_grad()
    other = copy.deepcopy(model)
    assert other.module is not model.module and other.head.weight is other.up.weight
    wanted = model.step(batch)
    torch.testing.assert_close(other.step(batch), wanted)
    for found, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert found is not expected
        torch.testing.assert_close(other.full_tensor(found.grad), model.full_tensor(expected.grad))  # type: ignore[arg-type]
    other.zero_grad()
    assert model.get_parameter("up.weight").grad is not None
