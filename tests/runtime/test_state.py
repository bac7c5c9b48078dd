"""What forward changes, and what is and is not differentiated, is after several steps as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import AutoparError
from autopar.runtime.module.parallel_module import ParallelModule
from tests.helpers.planning import CLUSTER, on, slow_devices
from tests.zoo.check import check_assignments, make_case

WIDTH = 6
STEPS = 3


class Normalised(nn.Module):
    """Batch norm with every kind of running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.cumulative(self.norm(self.conv(x)).relu()) * x).pow(2).mean()


class Counting(nn.Module):
    """A counter in place, one by assignment, an average of what passes by, a buffer in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.inner.register_buffer("shared", torch.ones(WIDTH))
        self.outer.register_buffer("shared", self.inner.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.steps = self.steps + 1
        self.inner.shared.mul_(0.9)
        y = self.inner(x) * self.inner.shared
        with torch.no_grad():
            self.average.lerp_(y.mean((0, 1)), 0.1)
        return (self.outer(y) * self.outer.shared / self.steps).pow(2).mean()


class Reparametrised(nn.Module):
    """Weight norm, and spectral norm with its power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spectral(self.weighted(x).tanh()).pow(2).mean()


class Partly(nn.Module):
    """Frozen, unused, and through ``no_grad``, ``detach`` and a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused, self.detached = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.used(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        with torch.no_grad():
            scale = self.used(x).abs().mean()
        return (self.frozen(y) * scale + self.detached(x).detach()).pow(2).mean()


class Checkpointed(nn.Module):
    """Both kinds of checkpoint, and a region in reduced precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.layers[0], x, use_reentrant=False)
        x = x + checkpoint(lambda t: self.layers[1](t).relu(), x, use_reentrant=True)
        return self.layers[2](x).pow(2).mean()


def sequence() -> torch.Tensor:
    return torch.randn(6, WIDTH, WIDTH)


KINDS = [Normalised, Counting, Reparametrised, Partly, Checkpointed]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind is Reparametrised else kind for kind in KINDS]
)
def test_any_assignment_is_one_device(kind: Callable[[], nn.Module]) -> None:
    """Loss, gradients and new buffers; ``make_case`` compares the graph with the model itself."""
    torch.manual_seed(0)
    case = make_case(kind(), (sequence(),))
    for mesh in ((2,), (2, 2)):
        check_assignments(case, mesh, range(3))


def trained(model: Any, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and buffers after some steps of either kind of model."""
    make = model.optimizer if isinstance(model, ParallelModule) else lambda cls, **k: cls(model.parameters(), **k)
    optimizer = make(torch.optim.SGD, lr=0.1)
    for index, batch in enumerate(batches):
        if isinstance(model, ParallelModule) and index % 2:
            model.step(batch)
        else:
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


ASKED: dict[str, dict[str, Any]] = {
    "all divided": {"cluster": slow_devices(), "options": autopar.Options(zero=3)},
    "best": {"cluster": CLUSTER},
    "slow devices": {"cluster": slow_devices()},
    "fully sharded": {"cluster": CLUSTER, "options": autopar.Options(zero=3)},
}


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["all divided", *(pytest.param(n, marks=pytest.mark.slow) for n in list(ASKED)[1:])])
def test_several_steps_end_in_the_same_state_whatever_the_plan(asked: str) -> None:
    torch.manual_seed(1)
    batches = [sequence() for _ in range(STEPS)]

    def models() -> list[nn.Module]:
        torch.manual_seed(0)
        return [kind() for kind in KINDS]

    def work(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
        return [trained(autopar.parallelize(m, (world,), **ASKED[asked]), batches) for m in models()]

    expected = [trained(model, batches) for model in models()]
    for kind, one, other in zip(KINDS, on(2, work)[0], expected, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, msg=lambda m, k=kind, n=name: f"{k.__name__} {n}: {m}")


def alone(model: nn.Module, **given: Any) -> ParallelModule:
    return autopar.parallelize(copy.deepcopy(model), (1,), cluster=CLUSTER, **given)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    found, expected = gradients(model), gradients(reference)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("freeze_first", [False, True])
def test_freezing_after_the_first_call_is_noticed(freeze_first: bool) -> None:
    """Each way round: what was trained is frozen, what was frozen is trained."""
    torch.manual_seed(0)
    reference, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(6, 4)
    reference[0].requires_grad_(not freeze_first)
    model = alone(reference, loss_fn=lambda y: y.pow(2).mean())
    model.step(x)
    for m in (model, reference):
        m.zero_grad()
        m.get_submodule("0").requires_grad_(freeze_first)
    model.step(x)
    reference(x).pow(2).mean().backward()
    assert_same_gradients(model, reference)


def test_gradient_of_an_input() -> None:
    torch.manual_seed(0)
    reference = Partly()
    x = sequence()
    model, one, other = alone(reference), x.clone().requires_grad_(), x.clone().requires_grad_()
    model(one).backward()
    reference(other).backward()
    assert one.grad is not None
    torch.testing.assert_close(one.grad, other.grad)
    assert_same_gradients(model, reference)


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.router(x).softmax(-1)
        return {
            "main": self.main(x).pow(2).mean(),
            "balance": scores.mean((0, 1)).pow(2).sum(),
            "scores": scores,
        }


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_several_losses(share: float) -> None:
    """With a share of 0 the second loss takes no part in backward."""
    torch.manual_seed(0)
    reference, x = TwoLosses(), sequence()
    model = alone(reference)
    for m in (model, reference):
        out = m(x)
        loss = out["main"] + out["scores"].std()
        (loss + share * out["balance"] if share else loss).backward()
    assert_same_gradients(model, reference)


def test_losses_one_after_the_other_are_refused_with_what_to_do() -> None:
    model = alone(TwoLosses())
    out = model(sequence())
    out["main"].backward(retain_graph=True)
    with pytest.raises(AutoparError, match="add the losses"):
        out["balance"].backward()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
            assert y.dtype == torch.bfloat16
        return F.mse_loss(self.second(y.float()), x)


def test_autocast_inside_the_model() -> None:
    torch.manual_seed(0)
    reference, x = Autocast(), sequence()
    model = alone(reference)
    found, expected = model(x), reference(x)
    found.backward()
    expected.backward()
    # A product and its bias are rounded one after the other.
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    for name, gradient in gradients(reference).items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=2e-2, atol=1e-3)
