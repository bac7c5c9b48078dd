"""Buffers that only their own new value depends on are updated in place, and all buffers as in eager execution."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.ir.program import Section
from autopar.runtime.calls.call import Call
from autopar.runtime.execute.buffer_updates import set_apart, updates
from tests.helpers.planning import on

BATCH_NORM = "%n, %n.1, %n.2, %n.3, %n.4 = aten._native_batch_norm_legit_functional.default(%x, None, None, %mean, %var"


def section(body: str, outputs: str) -> Section:
    return Section.from_text(f"forward(%x, %mean, %var):\n  {body}\n  return {outputs}\n")


@pytest.mark.parametrize(
    ("body", "outputs", "apart", "written"),
    [
        (f"{BATCH_NORM}, True, 0.1, 1e-05)", "%n, %n.3, %n.4", {"mean", "var"}, {"n"}),
        # Saved beside: a view of it would change with it.
        (f"{BATCH_NORM}, True, 0.1, 1e-05)", "%mean, %n.3, %n.4", {"var"}, set()),
        # In evaluation the result depends on the averages.
        (f"{BATCH_NORM}, False, 0.1, 1e-05)", "%n, %n.3, %n.4", set(), set()),
        # The new average is saved too: the next call would overwrite what backward reads.
        ("%a = aten.add.Tensor(%mean, 1)\n  %b = aten.add.Tensor(%var, 1)", "%a, %a, %b", {"var"}, {"b"}),
        # Averages that are exchanged.
        ("%a = aten.add.Tensor(%mean, 1)\n  %b = aten.add.Tensor(%var, 1)", "%x, %b, %a", set(), set()),
        # Two operations read it.
        ("%a = aten.mul.Tensor(%mean, 2)\n  %b = aten.add.Tensor(%mean, %a)", "%x, %b, %var", {"mean", "var"}, set()),
        # What may raise by its value, or draws numbers, is repeated with the old one.
        ("%a = aten.bernoulli.p(%mean, 0.5)\n  %b = aten.add.Tensor(%var, 1)", "%x, %a, %b", {"var"}, {"b"}),
    ],
)
def test_what_is_apart(body: str, outputs: str, apart: set[str], written: set[str]) -> None:
    forward, changed = section(body, outputs), {"mean": 1, "var": 2}
    found = set_apart(forward, changed)
    assert found == apart
    assert set(updates(forward, {name: changed[name] for name in found})) == written


class Counting(nn.Module):
    """A batch norm, a count, an average that the output reads before it changes, and a sum of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("rows", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("total", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.norm(self.mix(x))
        moved = y * (self.seen + 1)
        self.seen.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.rows += x.shape[0]
        self.total += self.mix.bias.detach()
        return {"loss": moved.square().mean(), "moved": moved}


def trained(model: nn.Module, loss: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> list[torch.Tensor]:
    """Losses of steps in pairs: two forwards before the backwards of both."""
    found = []
    for step in range(3):
        torch.manual_seed(step)
        first, second = (loss(model(torch.randn(8, 6))) for _ in range(2))
        (second * 2).backward()
        first.backward()
        found += [first.detach(), second.detach()]
    return found


def compare_with_eager(own: bool, mesh: DeviceMesh, options: autopar.Options) -> None:
    eager = Counting()
    model = copy.deepcopy(eager)
    buffers = dict(model.named_buffers())
    parallel = autopar.parallelize(model, mesh, options=options)

    def loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
        return out["moved"].exp().mean() + out["loss"] if own else out["loss"]

    for found, wanted in zip(trained(parallel, loss), trained(eager, loss), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for name, wanted in eager.named_buffers():
        assert buffers[name] is dict(model.named_buffers())[name]
        torch.testing.assert_close(buffers[name], wanted, rtol=1e-5, atol=1e-6)
    for (name, parameter), expected in zip(parallel.named_parameters(), eager.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        # Batch norm takes away the bias: its gradient is zero but for rounding, of sums of terms of this size.
        rounding = 1e-5 if name == "mix.bias" else 1e-6
        torch.testing.assert_close(
            parallel.full_tensor(parameter.grad), expected.grad, rtol=1e-4, atol=rounding, msg=name
        )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_and_gradients_are_those_of_eager(ranks: int, compiled: bool) -> None:
    """With a loss of the user's own, the first backward runs forward once more, which counts nothing."""

    def work(rank: int, world: int) -> None:
        mesh, options = init_device_mesh("cpu", (world,)), autopar.Options(compile=compiled)
        for own in (False, True):
            compare_with_eager(own, mesh, options)

    on(ranks, work)


def test_averages_of_a_batch_norm_are_written_in_place() -> None:
    def work(rank: int, world: int) -> tuple[frozenset[str], frozenset[str]]:
        parallel = autopar.parallelize(Counting(), init_device_mesh("cpu", (1,)))
        parallel(torch.randn(8, 6))
        (call,) = (call for _, call in parallel._programs.calls())
        assert isinstance(call, Call)
        return call.executable.buffers.written, call.executable.buffers.apart

    ((written, apart),) = on(1, work)
    assert written >= {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "rows"}
    assert "seen" not in apart
