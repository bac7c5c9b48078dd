"""The scaled loss of fp16: gradients are those of the loss, a step that overflows changes nothing, on no rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.options import Options
from autopar.runtime.loss_scale import FIRST, LossScale
from tests.questions import on


class Blocks(nn.Module):
    """The gradient of the loss at ``y`` is the scale itself, in fp16: 2**16 is too much, 2**15 is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x)).float() / 8
        return self.blocks[0](x).float().sum() / 64


def _scaled_up(factor: float) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Blocks()
    with torch.no_grad():
        model.blocks[0].weight.mul_(factor)
    return model, torch.randn(8, 8)


def _reference(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients by torch's own means, at a scale that does not overflow."""
    model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.float16):
        loss = model(x)
    (loss * 2.0**8).backward()
    return {name: p.grad / 2.0**8 for name, p in model.named_parameters() if p.grad is not None}


def _overflows_and_recovers(model: Any, reference: nn.Module, x: torch.Tensor) -> None:
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
    before = {name: model.full_tensor(p).clone() for name, p in model.named_parameters()}
    model.set_loss_scale_state({**LossScale().state(), "scale": 2.0**40})
    loss = model.step(x)
    assert model.overflowed and bool(loss.isfinite()) and model.loss_scale_state()["scale"] == 2.0**39
    assert all(p.grad is None for p in model.parameters())
    assert float(model.clip_grad_norm_(1.0)) == 0.0
    optimizer.step()
    assert all(torch.equal(model.full_tensor(p), before[name]) for name, p in model.named_parameters())
    assert not optimizer.state, "as if the step had not been"
    while model.overflowed:
        model.step(x)
    wanted = _reference(reference, x)
    for name, parameter in model.named_parameters():
        found = model.full_tensor(parameter.grad)
        torch.testing.assert_close(found, wanted[name], rtol=0, atol=4e-3 * float(wanted[name].abs().max()))
    model.step(x)
    for name, parameter in model.named_parameters():  # Added up unscaled, whatever the scale was.
        found = model.full_tensor(parameter.grad)
        torch.testing.assert_close(found, 2 * wanted[name], rtol=0, atol=8e-3 * float(wanted[name].abs().max()))
    model.set_loss_scale_state({**model.loss_scale_state(), "scale": 2.0**40})
    model.step(x)
    assert all(p.grad is None for p in model.parameters()), "what was added up before is dropped with it"


def test_one_process() -> None:
    model, x = _scaled_up(1.0)
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), 1, options=Options(precision="fp16"))
        assert parallel.loss_scale_state()["scale"] == FIRST
        _overflows_and_recovers(parallel, model, x)
        parallel(x).backward()
        assert parallel.overflowed and all(p.grad is None for p in parallel.parameters())
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(parallel.loss_scale_state())
        assert scaler.get_scale() == parallel.loss_scale_state()["scale"] / 1 == 2.0**39 / 2
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [{"zero": 3, "stages": 1}, {"stages": 2, "microbatches": 4, "schedule": "1f1b"}],
    ids=["sharded", "stages"],
)
def test_ranks_agree(options: dict[str, Any]) -> None:
    def work(rank: int, world: int) -> None:
        model, x = _scaled_up(1.0)
        parallel = autopar.parallelize(copy.deepcopy(model), (world,), options=Options(precision="fp16", **options))
        _overflows_and_recovers(parallel, model, x)

    on(2, work)


def test_the_rule_is_that_of_torch() -> None:
    """Compared with a GradScaler told the same outcomes."""
    ours = LossScale(scale=8.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    from autopar.runtime.groups import mesh_groups, mesh_of_one

    try:
        groups = mesh_groups(mesh_of_one("cpu", 1))
        for finite in (True, True, True, True, False, True, False, False, True, True, True):
            given = torch.tensor([1.0 if finite else float("inf")])
            weight.grad = theirs.scale(given)
            theirs.step(optimizer)
            theirs.update()
            assert ours.settle([given.clone()], groups) == finite
            assert ours.scale == theirs.get_scale() and ours.state() == theirs.state_dict()
    finally:
        dist.destroy_process_group()
    other = LossScale()
    other.load(ours.state())
    assert other.state() == ours.state()


def test_other_policies_scale_nothing() -> None:
    model, x = _scaled_up(1.0)
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), 1, options=Options(precision="bf16"))
        parallel.step(x)
        assert parallel.loss_scale_state() == {} and not parallel.overflowed
    finally:
        dist.destroy_process_group()
