"""What a trace read from Python objects is guarded: attributes of modules and of the objects they lead to, containers,
constant tensors, globals, closures, and what modules are made of. What is not read is not guarded."""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.guards.guards import Guards
from autopar.trace.guards.random_numbers import DrawError
from autopar.trace.guards.values import freeze
from autopar.trace.tracer import trace

GLOBAL = 2.0
TABLE = {"gain": 1.0, "unread": 1.0}


@dataclass
class Inner:
    gain: float = 1.0
    unread: int = 3


@dataclass
class Config:
    inner: Inner = field(default_factory=Inner)
    modes: dict[str, Any] = field(default_factory=lambda: {"kind": "plain", "sizes": [1, 2]})


class Slotted:
    __slots__ = ("gain", "unread")

    def __init__(self) -> None:
        self.gain, self.unread = 1.0, 1.0


class Criterion:
    def __init__(self) -> None:
        self.alpha, self.weight = 1.0, torch.ones(4)

    def __call__(self, output: Tensor) -> Tensor:
        return (output * self.weight).square().mean() * self.alpha


class Net(nn.Module):
    scale = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.1), nn.LayerNorm(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.plain = nn.Linear(4, 4, bias=False)
        self.hidden = [nn.Linear(4, 4).requires_grad_(False)]
        self.beta, self.use_aux, self.unread = 1.0, False, 1.0
        self.config, self.slotted = Config(), Slotted()
        self.parsed, self.space = argparse.Namespace(gain=1), types.SimpleNamespace(gain=1)
        self.mask, self.large, self.array = torch.ones(4), torch.ones(4, 4096), np.ones(4, np.float32)
        self.register_buffer("seen", torch.ones(4))

    @property
    def gain(self) -> float:
        return self.config.inner.gain

    def scaled(self, x: Tensor) -> Tensor:
        return x * GLOBAL * TABLE["gain"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.first(x))) * self.beta * self.scale * self.mask * self.seen
        for layer in self.layers:
            x = layer(x)
        if self.use_aux:
            x = x + 1
        x = x * self.gain * self.config.modes["sizes"][1] * self.slotted.gain * self.parsed.gain * self.space.gain
        x = self.plain(x) + self.large.sum() + torch.tensor(self.array)
        return self.scaled(self.hidden[0](x))


@cache
def traced() -> tuple[Net, Criterion, Guards]:
    model, criterion = Net(), Criterion()
    guards = trace(model, (torch.randn(3, 4),), device="cpu", loss_fn=criterion).reads
    assert guards.changed(model) is None
    return model, criterion, guards


def replaced(owner: Callable[[Net], Any], name: str, value: Any) -> Callable[[Net, pytest.MonkeyPatch], None]:
    return lambda model, patch: patch.setattr(owner(model), name, value)


def test_it_is_as_torch_made_it_afterwards() -> None:
    traced()
    kinds = (nn.Module, Config, Inner, Slotted, Criterion, argparse.Namespace)
    assert not any("__getattribute__" in vars(kind) for kind in kinds)


CHANGES: dict[str, tuple[str, Callable[[Net, pytest.MonkeyPatch], None]]] = {
    "attribute": ("model.beta was 1.0 when traced and is 3.0", replaced(lambda m: m, "beta", 3.0)),
    "type": ("model.beta was 1.0 when traced and is 1", replaced(lambda m: m, "beta", 1)),
    "flag": ("model.use_aux was False when traced and is True", replaced(lambda m: m, "use_aux", True)),
    "dropout": ("model.drop.p was 0.1 when traced and is 0.9", replaced(lambda m: m.drop, "p", 0.9)),
    "eps": ("model.norm.eps was 1e-05", replaced(lambda m: m.norm, "eps", 0.1)),
    "class": ("Net.scale was 1.5", replaced(lambda m: Net, "scale", 2.0)),
    "over the class": ("model.scale was not there when traced and is 2.0", lambda m, p: vars(m).update(scale=2.0)),
    "property": ("model.config.inner.gain was 1.0", replaced(lambda m: m.config.inner, "gain", 2.0)),
    "object": ("model.config was a Config when traced and is another", replaced(lambda m: m, "config", Config())),
    "nested": ("model.config.modes['sizes'][1] was 2", lambda m, p: p.setitem(m.config.modes, "sizes", [1, 3])),
    "slots": ("model.slotted.gain was 1.0", replaced(lambda m: m.slotted, "gain", 2.0)),
    "namespace": ("model.parsed.gain was 1", replaced(lambda m: m.parsed, "gain", 2)),
    "simple namespace": ("model.space['gain'] was 1", replaced(lambda m: m.space, "gain", 2)),
    "tensor": ("model.mask was a tensor [4] of float32 when", replaced(lambda m: m, "mask", torch.zeros(4))),
    "shape": ("model.mask was a tensor [4] of float32", replaced(lambda m: m, "mask", torch.ones(1))),
    "array": ("model.array was an array [4]", replaced(lambda m: m, "array", np.zeros(4, np.float32))),
    "global": (f"{__name__}.GLOBAL was 2.0", lambda m, p: p.setattr(sys.modules[__name__], "GLOBAL", 3.0)),
    "table": (f"{__name__}.TABLE['gain'] was 1.0", lambda m, p: p.setitem(TABLE, "gain", 3.0)),
    "function": ("model.first.forward was not there", lambda m, p: vars(m.first).update(forward=lambda x: x)),
    "class function": ("Net.forward was Net.forward", lambda m, p: p.setattr(Net, "forward", Net.scaled)),
    "buffer": ("model.seen was a tensor [4]", lambda m, p: p.setitem(m._buffers, "seen", torch.ones(1))),
    "module": ("model.layers.1 was a Linear when", lambda m, p: p.setitem(m.layers._modules, "1", nn.Linear(4, 4))),
    "kind": ("model.drop was a Dropout when", lambda m, p: p.setitem(m._modules, "drop", nn.Identity())),
    "more modules": ("model.layers.2 was not there", lambda m, p: p.setitem(m.layers._modules, "2", nn.Linear(4, 4))),
    "parameter": (
        "model.first.weight was a tensor [4, 4]",
        lambda m, p: p.setitem(m.first._parameters, "weight", nn.Parameter(torch.ones(4, 4))),
    ),
    "bias": (
        "model.plain.bias was None when traced",
        lambda m, p: p.setitem(m.plain._parameters, "bias", nn.Parameter(torch.ones(4))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_read_is_guarded(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, guards = traced()
    said, make = CHANGES[change]
    before = [dict(vars(model)), dict(vars(model.first))]
    try:
        make(model, monkeypatch)
        assert (guards.changed(model) or "").startswith(said)
    finally:
        monkeypatch.undo()
        for module, saved in zip((model, model.first), before, strict=True):
            vars(module).clear()
            vars(module).update(saved)
    assert guards.changed(model) is None


def test_tensors_are_compared_by_their_values() -> None:
    model, criterion, guards = traced()
    with torch.no_grad():
        for tensor in (model.mask, model.mask.data, model.large, criterion.weight, model.hidden[0].weight):
            tensor.mul_(2)
            assert "holds other values now" in (guards.changed(model) or "")
            tensor.div_(2)
            assert guards.changed(model) is None
    model.mask = torch.ones(4)
    assert guards.changed(model) is None


def test_what_was_not_read_is_not_guarded() -> None:
    model, _, guards = traced()
    model.unread = model.config.inner.unread = model.slotted.unread = 7
    model.fresh, TABLE["unread"] = 3, 1.0  # type: ignore[assignment]
    model.seen.mul_(2)
    with torch.no_grad():
        model.first.weight.mul_(2)
    assert guards.changed(model) is None
    model.seen.div_(2)
    model.first.weight.data.div_(2)


def test_a_loss_function_is_guarded() -> None:
    model, criterion, guards = traced()
    criterion.alpha = 2.0
    assert guards.changed(model) == "loss_fn.alpha was 1.0 when traced and is 2.0"
    criterion.alpha, weight = 1.0, 1.0

    def closure(output: Tensor) -> Tensor:
        return (output * weight).mean()

    found = trace(model, (torch.randn(3, 4),), device="cpu", loss_fn=closure).reads
    weight = 2.0
    assert ".weight was 1.0 when traced and is 2.0" in (found.changed(model) or "")


class Writes(nn.Module):
    """Forward writes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(4, 4), Inner()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.state.gain = self.state.gain / 2
        if self.last is None:
            self.last = x
        return self.layer(x * self.state.gain).mean()


def test_what_forward_writes_is_as_before() -> None:
    model = Writes()
    with pytest.warns(UserWarning, match=r"changes state\.gain when"):
        guards = trace(model, (torch.randn(3, 4),), device="cpu").reads
    assert model.state.gain == 1.0 and model.last is None
    assert guards.changed(model) is None
    model.state.gain = 0.5
    assert guards.changed(model) == "model.state.gain was 1.0 when traced and is 0.5"


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw, self.p = nn.Linear(4, 4), draw, 0.001
        self.own, self.other = random.Random(0), np.random.default_rng(0)


class Skips(Draws):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.draw() < self.p:  # rare
            x = self.layer(x)
        return x.mean()


class Scales(Draws):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean() * self.own.choice([1.0, 2.0])


class AddsNoise(Draws):
    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + torch.tensor(self.other.normal(size=4), dtype=torch.float32)).mean()


class Logs(Draws):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).mean()
        if self.draw() < self.p:
            logged.append(1)
        return x


logged: list[int] = []
REFUSED = (
    (Skips, lambda: random.random(), "draws from Python's random"),
    (Skips, lambda: np.random.rand(), "draws from numpy.random"),
    (Scales, None, r"draws from model\.1\.own"),
    (AddsNoise, None, r"draws from model\.1\.other"),
)


@pytest.mark.parametrize(("kind", "draw", "said"), REFUSED)
def test_numbers_drawn_by_python_are_refused(kind: type[Draws], draw: Any, said: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(DrawError, match=rf"(?s)module '1' at .*test_guards\.py:\d+.*{said}.*torch\.rand"):
        trace(nn.Sequential(nn.Identity(), kind(draw)), (torch.randn(3, 4),), device="cpu")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_draws_that_change_nothing_are_said() -> None:
    (note,) = trace(Logs(lambda: random.random()), (torch.randn(3, 4),), device="cpu").notes
    assert "test_guards.py" in note and "Python's random" in note


class DrawsWithTorch(nn.Module):
    """As the error advises."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < 0.5, x, x + self.block(x)).mean()


def test_numbers_drawn_by_torch_are_drawn_by_the_graph() -> None:
    graph = trace(DrawsWithTorch(), (torch.randn(3, 4),), device="cpu").graph
    assert "autopar.uniform" in graph.to_text() or "random" in graph.to_text()


class Lists(nn.Module):
    """Its parameter is in a list too."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=not frozen)
        self.bias = nn.Parameter(torch.ones(4))
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights[0] + self.bias).mean()


def test_parameters_in_lists_are_errors() -> None:
    with pytest.raises(TraceError, match=r"model\.weights\[0\] is a parameter in a list.*nn\.ParameterList"):
        trace(Lists(frozen=False), (torch.randn(3, 4),), device="cpu")
    trace(Lists(frozen=True), (torch.randn(3, 4),), device="cpu")


def test_parameters_that_nobody_registers_are_warned_of() -> None:
    model = Net()
    model.hidden[0].requires_grad_(True)
    with pytest.warns(UserWarning, match=r"model\.hidden\[0\]\.(weight|bias) is a parameter .* not register"):
        trace(model, (torch.randn(1, 4),), device="cpu")


def test_only_what_cannot_change_is_taken_for_the_same() -> None:
    """Such values are compared by identity at every call, the others item by item."""
    assert all(freeze(value).immutable for value in ((1, 2), ((1, "a"), frozenset({2})), torch.Size([3])))
    assert not any(freeze(value).immutable for value in ([1], (1, [2]), (torch.zeros(1),), {"a": 1}))
