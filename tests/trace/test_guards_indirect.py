"""What a model reads through classes, closures of one factory, partial functions and default arguments is guarded."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.trace.tracer import trace

GLOBAL = 2.0


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Settings:
    scale = 1.0
    table: ClassVar[dict[str, float]] = {"gain": 1.0}

    @classmethod
    def factor(cls) -> float:
        return cls.scaled_by

    scaled_by = 1.0


class FinerSettings(Settings):
    pass


def gained(gain: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def function(x: Tensor) -> Tensor:
        return x * gain

    def put(value: float) -> None:
        nonlocal gain
        gain = value

    return function, put


def scaled_by(x: Tensor, table: list[float], slotted: Slotted) -> Tensor:
    return x * table[0] * slotted.gain


class Indirect(nn.Module):
    """Reads through classes, closures of one factory, partial functions and default arguments."""

    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        (self.one, self.put_one), (self.other, self.put_other) = gained(1.0), gained(1.0)
        self.slotted, self.table = Slotted(), [1.0]
        self.partial = functools.partial(scaled_by, table=self.table, slotted=self.slotted)

    @property
    def seen(self) -> float:
        return GLOBAL

    def forward(self, x: Tensor, given: Slotted = Slotted(), *, more: dict[str, float] = {"gain": 1.0}) -> Tensor:  # noqa: B006, B008
        kind = type(self)
        x = x * FinerSettings.scale * FinerSettings.table["gain"] * FinerSettings.factor() * kind.beta * self.seen
        return self.partial(self.other(self.one(x))) * given.gain * more["gain"]


def _default(name: str, key: Any) -> Any:
    return getattr(Indirect.forward, name)[key]


INDIRECT: dict[str, tuple[str, Callable[[Indirect, pytest.MonkeyPatch], None]]] = {
    "class": ("FinerSettings.scale was 1.0", lambda m, p: p.setattr(Settings, "scale", 2.0)),
    "subclass": ("FinerSettings.scale was 1.0", lambda m, p: p.setattr(FinerSettings, "scale", 2.0, raising=False)),
    "table": ("FinerSettings.table['gain'] was 1.0", lambda m, p: p.setitem(Settings.table, "gain", 2.0)),
    "class method": ("FinerSettings.factor was", lambda m, p: p.setattr(Settings, "factor", lambda: 2.0)),
    "type(self)": ("Indirect.beta was 1.0", lambda m, p: p.setattr(Indirect, "beta", 2.0)),
    "whole class": (
        f"{__name__}.FinerSettings was FinerSettings",
        lambda m, p: p.setattr(sys.modules[__name__], "FinerSettings", Settings),
    ),
    "global of a property": (f"{__name__}.GLOBAL was", lambda m, p: p.setattr(sys.modules[__name__], "GLOBAL", 3.0)),
    "one closure": ("gained.<locals>.function.gain was 1.0", lambda m, p: m.put_one(2.0)),
    "other closure": ("gained.<locals>.function.gain was 1.0", lambda m, p: m.put_other(2.0)),
    "partial": ("model.partial.keywords['slotted'].gain was 1.0", lambda m, p: p.setattr(m.slotted, "gain", 2.0)),
    "list in partial": ("model.partial.keywords['table'][0] was 1.0", lambda m, p: m.table.append(m.table.pop() + 1)),
    "default": (
        "Indirect.forward.__defaults__[0].gain was 1.0",
        lambda m, p: p.setattr(_default("__defaults__", 0), "gain", 2.0),
    ),
    "keyword default": (
        "Indirect.forward.__kwdefaults__['more']['gain'] was 1.0",
        lambda m, p: p.setitem(_default("__kwdefaults__", "more"), "gain", 2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INDIRECT)
def test_what_is_read_through_classes_closures_and_arguments_is_guarded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, change = INDIRECT[name]
    model = Indirect()
    guards = trace(model, (torch.randn(3, 4),), device="cpu").reads
    assert guards.changed(model) is None
    change(model, monkeypatch)
    assert str(guards.changed(model)).startswith(said)
