"""Gradients of several batches added up by scaled steps, against one large batch on one device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime import run_local
from tests.helpers.marks import slow_but

SHARDED, STAGED = autopar.Options(zero=2), autopar.Options(stages=2, microbatches=2)
HALF = autopar.Options(precision="fp16")


@pytest.mark.parametrize("options", slow_but([SHARDED], [SHARDED, STAGED, HALF]), ids=["sharded", "staged", "half"])
def test_batches_add_up_to_a_large_one(options: autopar.Options) -> None:
    def work(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain, reference = (nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(2))
        reference.load_state_dict(plain.state_dict())
        model = autopar.parallelize(plain, (2,), options=options, loss_fn=lambda out: out.square().mean())
        whole = torch.randn(12, 6)
        losses = []
        for index, part in enumerate(whole.chunk(3)):
            with model.no_sync() if index < 2 else nullcontext():
                losses.append(model.step(part, scale=1 / 3 if index else torch.tensor(1 / 3)))
        wanted = reference(whole).square().mean()
        wanted.backward()
        close = {"rtol": 2e-2, "atol": 1e-3} if options is HALF else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(sum(losses).float() / 3, wanted.detach(), **close)
        for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            gradient = model.full_tensor(found.grad)  # type: ignore[arg-type]
            torch.testing.assert_close(gradient, expected.grad, **close, msg=lambda m, n=name: f"{n}: {m}")
        with pytest.raises(AutoparError, match="must be a finite number"):
            model.step(whole, scale=float("nan"))

    run_local(work, 2, timeout=120)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.line(x).square().mean() * scale


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_model_with_a_scale_of_its_own_gets_it(scale: float) -> None:
    model = autopar.parallelize(Scaling(), 1)
    batch = torch.randn(4, 3)
    loss = model.step(batch, scale=scale)
    with model.full_params() as whole:
        torch.testing.assert_close(loss, whole(batch, scale).detach())
