"""A training under fp16 goes on from a checkpoint under another plan, on one process and without us, scale included."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.options import Options
from autopar.runtime.state.loss_scale import LossScale
from tests.helpers.planning import on
from tests.runtime.test_loss_scale import Blocks

# A scale of 2**19 overflows and one of 2**18 does not, so that at this pace every third step is skipped.
FIRST_STATE: dict[str, Any] = {**LossScale().state(), "scale": 2.0**17, "growth_interval": 2}
BEFORE, AFTER = 6, 6
SHARDED = {"zero": 3, "stages": 1}
STAGED = {"stages": 2, "microbatches": 4, "schedule": "1f1b"}


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def reference() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


Trace = list[tuple[float, int]]


def steps(model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> Trace:
    """The state of the scale after each step."""
    found = []
    for number in numbers:
        model.step(batch_of(number))
        optimizer.step()
        optimizer.zero_grad()
        state = model.loss_scale_state()
        found.append((float(state["scale"]), int(state["_growth_tracker"])))
    return found


def by_torch() -> tuple[nn.Module, list[Trace]]:
    """The whole training by torch's own means: the model, and the scale after each step, before and after saving."""
    model, scaler = reference(), torch.amp.GradScaler("cpu")
    scaler.load_state_dict(FIRST_STATE)
    optimizer, traces = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    for numbers in (range(BEFORE), range(BEFORE, BEFORE + AFTER)):
        traces.append([_step_by_torch(model, optimizer, scaler, number) for number in numbers])
    return model, traces


def _step_by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, number: int
) -> tuple[float, int]:
    with torch.autocast("cpu", torch.float16):
        loss = model(batch_of(number))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale(), int(scaler.state_dict()["_growth_tracker"])


def trained(world: int, options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model = autopar.parallelize(reference(), (world,), options=Options(precision="fp16", **options))
    model.prepare((batch_of(0),), {}, "loss")
    return model, model.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3)


def saves(folder: Path, world: int, options: dict[str, Any]) -> Trace:
    model, optimizer = trained(world, options)
    model.set_loss_scale_state(FIRST_STATE)
    found = steps(model, optimizer, range(BEFORE))
    parameters, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": parameters, "optimizer": state, "scale": model.loss_scale_state()}, checkpoint_id=folder)
    return found


def loads(folder: Path, world: int, options: dict[str, Any]) -> tuple[Trace, dict[str, torch.Tensor]]:
    model, optimizer = trained(world, options)
    parameters, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": parameters, "optimizer": state, "scale": model.loss_scale_state()}
    checkpoint.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    model.set_loss_scale_state(saved["scale"])
    found = steps(model, optimizer, range(BEFORE, BEFORE + AFTER))
    return found, {name: model.full_tensor(p) for name, p in model.named_parameters()}


def check_equal(found: dict[str, torch.Tensor], wanted: nn.Module) -> None:
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(found[name].detach(), parameter.detach(), rtol=0, atol=4e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "loading"),
    [(SHARDED, STAGED), (STAGED, SHARDED)],
    ids=["to stages", "to shards"],
)
def test_another_plan_goes_on_where_one_left_off(
    tmp_path: Path, saving: dict[str, Any], loading: dict[str, Any]
) -> None:
    wanted, (before, after) = by_torch()
    assert any(a < b for (a, _), (b, _) in itertools.pairwise(before)), "grows"
    assert before[-1][1] % FIRST_STATE["growth_interval"] != 0, "saved between two changes"
    for trace in on(2, lambda rank, world: saves(tmp_path, world, saving)):
        assert trace == before
    for trace, parameters in on(2, lambda rank, world: loads(tmp_path, world, loading)):
        assert trace == after
        check_equal(parameters, wanted)
    try:
        trace, parameters = loads(tmp_path, 1, {})
        assert trace == after
        check_equal(parameters, wanted)
    finally:
        dist.destroy_process_group()
    goes_on_by_torch(tmp_path, after, wanted)


def goes_on_by_torch(folder: Path, after: Trace, wanted: nn.Module) -> None:
    """The plain model with torch's scaler."""
    model, scaler = copy.deepcopy(reference()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    parameters, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": parameters, "optimizer": state, "scale": LossScale().state()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Without processes, which is what is meant.
        checkpoint.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    scaler.load_state_dict(saved["scale"])
    assert [_step_by_torch(model, optimizer, scaler, n) for n in range(BEFORE, BEFORE + AFTER)] == after
    check_equal(dict(model.named_parameters()), wanted)
