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
from autopar.runtime.state.loss_scale import FIRST, LossScale
from tests.helpers.planning import on


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
        model.zero_grad()
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
    while model.loss_scale_state()["scale"] > FIRST / 2:  # Until it is so low that passes no longer overflow.
        model.set_loss_scale_state({**model.loss_scale_state(), "scale": model.loss_scale_state()["scale"] / 2})
    model.step(x)
    assert model.overflowed and all(p.grad is None for p in model.parameters()), "a part of a sum is no gradient"
    optimizer.step()
    assert model.overflowed and not optimizer.state, "it tells of the step that was skipped"
    model.step(x)
    assert not model.overflowed and all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    model.set_loss_scale_state({**LossScale().state(), "scale": FIRST / 2 if dist.get_rank() == 0 else 1.0})
    assert model.loss_scale_state()["scale"] == FIRST / 2, "that of rank 0"


def test_one_process() -> None:
    model, x = _scaled_up(1.0)
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), 1, options=Options(precision="fp16"))
        assert parallel.loss_scale_state()["scale"] == FIRST
        _overflows_and_recovers(parallel, model, x)
        parallel.set_loss_scale_state({**LossScale().state(), "scale": 2.0**40})
        parallel(x).backward()
        assert parallel.overflowed and all(p.grad is None for p in parallel.parameters())
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(parallel.loss_scale_state())
        assert scaler.get_scale() == parallel.loss_scale_state()["scale"] == 2.0**39
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"zero": 3, "stages": 1}),
        pytest.param(2, {"stages": 2, "microbatches": 4, "schedule": "1f1b"}, marks=pytest.mark.slow),
        pytest.param(3, {"stages": (1, 2), "microbatches": 4, "schedule": "1f1b", "zero": 1}, marks=pytest.mark.slow),
    ],
    ids=["sharded", "stages", "unequal stages"],
)
def test_ranks_agree(ranks: int, options: dict[str, Any]) -> None:
    def work(rank: int, world: int) -> None:
        model, x = _scaled_up(1.0)
        parallel = autopar.parallelize(copy.deepcopy(model), (world,), options=Options(precision="fp16", **options))
        _overflows_and_recovers(parallel, model, x)

    on(ranks, work)


def test_the_rule_is_that_of_torch() -> None:
    """Compared with a GradScaler told the same outcomes."""
    ours = LossScale(scale=8.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    from autopar.runtime.comm.groups import mesh_groups, mesh_of_one

    try:
        groups = mesh_groups(mesh_of_one("cpu", 1))
        for finite in (True, True, True, True, False, True, False, False, True, True, True):
            given = torch.tensor([1.0 if finite else float("inf")])
            weight.grad = theirs.scale(given)
            theirs.step(optimizer)
            theirs.update()
            for _ in range(3):  # Added up, they are one step.
                assert ours.settle([given.clone()], [], groups) == finite
            ours.consumed()
            ours.consumed()
            assert ours.scale == theirs.get_scale() and ours.state() == theirs.state_dict()
    finally:
        dist.destroy_process_group()
    other = LossScale()
    other.load(ours.state())
    assert other.state() == ours.state()


def _one_device() -> tuple[Any, torch.Tensor]:
    model, x = _scaled_up(1.0)
    parallel = autopar.parallelize(model, 1, options=Options(precision="fp16"))
    parallel.prepare((x,), {})
    return parallel, x


def _set_scale(parallel: Any, scale: float) -> None:
    parallel.set_loss_scale_state({**LossScale().state(), "scale": scale})


def _gradients(parallel: Any) -> list[torch.Tensor | None]:
    return [p.grad for p in parallel.parameters()]


@pytest.mark.parametrize("overflowing", [0, 1])
def test_autograd_leaves_no_part_of_a_sum(overflowing: int) -> None:
    """Of two passes in one backward() one overflows, the one that runs first or last; a penalty has gradients too."""
    parallel, x = _one_device()
    try:
        huge = x * 2.0**9  # Of the sum over x, which is the gradient of the last product's weights.
        given = (huge, x) if overflowing == 0 else (x, huge)
        _set_scale(parallel, FIRST / 4)
        parallel(huge).backward()
        assert parallel.overflowed
        parallel.zero_grad()
        _set_scale(parallel, FIRST / 4)
        parallel(x).backward()
        assert not parallel.overflowed
        parallel.zero_grad()
        _set_scale(parallel, FIRST / 4)
        penalty = sum(p.to_local().square().sum() for p in parallel.parameters())
        (parallel(given[0]) + parallel(given[1]) + penalty).backward()
        assert parallel.overflowed and not any(g is not None for g in _gradients(parallel))
        assert parallel.loss_scale_state()["scale"] == FIRST / 8
        parallel(x).backward()
        assert parallel.overflowed and not any(g is not None for g in _gradients(parallel))
        parallel.zero_grad()
        parallel(x).backward()
        assert not parallel.overflowed and all(g is not None for g in _gradients(parallel))
    finally:
        dist.destroy_process_group()


def test_an_optimizer_of_the_user_ends_a_step() -> None:
    parallel, x = _one_device()
    try:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        _set_scale(parallel, 2.0**40)
        parallel.step(x)
        _set_scale(parallel, 1.0)
        before = [p.full_tensor().clone() for p in parallel.parameters()]
        parallel.step(x)
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # Of another model.
        parallel.step(x)
        optimizer.step()
        assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, parallel.parameters(), strict=True))
        for _ in range(4):
            parallel.step(x)
        optimizer.step()
        assert not parallel.overflowed and parallel.loss_scale_state()["_growth_tracker"] == 1
        assert not torch.equal(before[0], next(parallel.parameters()).full_tensor())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_step_left_out_ends_with_zero_grad(cls: type[torch.optim.Optimizer]) -> None:
    parallel, x = _one_device()
    try:
        optimizer = parallel.optimizer(cls, lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        _set_scale(parallel, 2.0**40)
        stepped = 0
        for _ in range(40):
            parallel.step(x)
            if not parallel.overflowed:
                optimizer.step()
                schedule.step()
                stepped += 1
            optimizer.zero_grad()
        assert stepped > 10 and parallel.loss_scale_state()["_growth_tracker"] == stepped
        copy.deepcopy(optimizer.state_dict())
    finally:
        dist.destroy_process_group()


def test_gradients_of_inputs_are_those_of_the_loss() -> None:
    """Also where those of parameters overflow: the user may add them to something."""
    model, x = _scaled_up(1.0)
    try:
        parallel = autopar.parallelize(model, 1, options=Options(precision="fp16"))
        found = []
        for scale in (1.0, 2.0**20):
            _set_scale(parallel, scale)
            leaf = x.clone().requires_grad_()
            parallel(leaf).backward()
            assert leaf.grad is not None and parallel.overflowed == (scale > 1.0)
            found.append(leaf.grad)
            parallel.zero_grad()
        finite = found[1].isfinite()
        assert bool(finite.any())
        torch.testing.assert_close(found[1][finite], found[0][finite], rtol=1e-2, atol=1e-4)
    finally:
        dist.destroy_process_group()


def _weights_if_skipped_by_torch(x: torch.Tensor, passes: int) -> list[torch.Tensor]:
    """Of a loop with a GradScaler that leaves out step and zero_grad after an overflow."""
    model, scaler = _scaled_up(1.0)[0], torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for _ in range(passes):
        with torch.autocast("cpu", torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            raise AssertionError("it never gets here")
        scaler._scale.fill_(scaler.get_scale() / 2)  # type: ignore[union-attr]
    return [p.detach() for p in model.parameters()]


def test_a_loop_that_leaves_out_step_and_zero_grad_trains_no_more_than_by_torch() -> None:
    parallel, x = _one_device()
    try:
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        _set_scale(parallel, 2.0**40)
        parallel.step(x)
        for _ in range(2):
            assert parallel.overflowed
            parallel.step(x)
        stuck = [p.full_tensor() for p in parallel.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(stuck, _weights_if_skipped_by_torch(x, 3), strict=True))
        while parallel.overflowed:
            optimizer.zero_grad()
            parallel.step(x)
        assert all(g is not None for g in _gradients(parallel))
    finally:
        dist.destroy_process_group()


def test_passes_that_are_added_up_are_not_warned_of() -> None:
    """Also where each is followed by a look at whether gradients overflowed; and the next step goes on."""
    parallel, x = _one_device()
    try:
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        _set_scale(parallel, 2.0**19)
        logged: list[bool] = []
        for _ in range(3):
            for _ in range(4):
                parallel.step(x)
                logged.append(parallel.overflowed)
            optimizer.step()
            optimizer.zero_grad()
        assert logged == [True] * 4 + [False] * 8
        assert not parallel.overflowed and parallel.loss_scale_state() == {
            **LossScale().state(),
            "scale": 2.0**18,
            "_growth_tracker": 2,
        }
    finally:
        dist.destroy_process_group()


def test_who_never_consumes_gradients_is_told_once_a_step_and_goes_on() -> None:
    scale = LossScale()
    from autopar.runtime.comm.groups import mesh_groups, mesh_of_one

    try:
        groups = mesh_groups(mesh_of_one("cpu", 1))
        for _ in range(2):
            assert not scale.settle([torch.tensor([torch.inf])], [], groups)
            for _ in range(254):
                assert not scale.settle([torch.ones(1)], [], groups)
            with pytest.warns(UserWarning, match=r"256 passes .*zero_grad"):
                assert not scale.settle([torch.ones(1)], [], groups)
            for _ in range(1500):
                assert not scale.settle([torch.ones(1)], [], groups) and scale.overflowed
            scale.consumed()
            assert scale.settle([torch.ones(1)], [], groups)
            scale.consumed()
    finally:
        dist.destroy_process_group()


def test_other_policies_scale_nothing() -> None:
    model, x = _scaled_up(1.0)
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), 1, options=Options(precision="bf16"))
        parallel.step(x)
        assert parallel.loss_scale_state() == {} and not parallel.overflowed
    finally:
        dist.destroy_process_group()
