"""What a call itself writes before it reads it is no guard, and everything that a trace has written is put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime import run_local
from autopar.trace.tracer import trace

COUNT = 0
IS_TRACED: bool | None = False
TABLE: dict[str, int] = {"calls": 0}


class Collector:
    """As ``_active_collector`` of transformers: compilers cannot trace what it otherwise does, which a flag says."""

    def __init__(self) -> None:
        self.compiling, self.value = False, 0

    def begin(self) -> None:
        if torch.compiler.is_compiling():
            self.compiling = True
        self.value = 2

    def end(self) -> None:
        if self.compiling:
            self.compiling = False


COLLECTOR = Collector()


class Settings:
    is_traced = False


class Slotted:
    __slots__ = ("scale",)
    scale: float


class Narrow(nn.Module):
    """One layer, and a number that it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def number(self) -> float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.number()).square().mean()


class Collects(Narrow):
    def forward(self, x: Tensor) -> Tensor:
        COLLECTOR.begin()
        try:
            return super().forward(x)
        finally:
            COLLECTOR.end()

    def number(self) -> float:
        return COLLECTOR.value


class SetsAFlag(Narrow):
    """Of the module itself, which had none."""

    is_traced: bool | None = None

    def number(self) -> float:
        self.is_traced = torch.compiler.is_compiling()
        return 1.0 if self.is_traced is not None else 2.0


class SetsASlot(Narrow):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()
        self.slotted.scale = 3.0

    def number(self) -> float:
        self.slotted.scale = 4.0 if torch.compiler.is_compiling() else 4.5
        return min(self.slotted.scale, 4.0)


class SetsAGlobal(Narrow):
    def number(self) -> float:
        global IS_TRACED
        IS_TRACED = Settings.is_traced = torch.compiler.is_compiling()
        return 1.0 if IS_TRACED is Settings.is_traced else 2.0


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    module: Any = sys.modules[__name__]
    yield
    module.COUNT, module.IS_TRACED, Settings.is_traced = 0, False, False
    TABLE["calls"] = 0
    COLLECTOR.__init__()  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Collects, SetsAFlag, SetsASlot, SetsAGlobal])
def test_what_a_call_sets_before_it_reads_it_is_no_guard(kind: type[Narrow]) -> None:
    model, x = kind(), torch.randn(3, 4)
    guards = trace(model, (x,), device="cpu").reads
    for _ in range(2):
        assert guards.changed(model) is None
        model(x)


def test_a_flag_of_an_object_is_what_it_was_and_is_not_guarded() -> None:
    model = Collects()
    guards = trace(model, (torch.randn(3, 4),), device="cpu").reads
    assert vars(COLLECTOR) == {"compiling": False, "value": 0}
    COLLECTOR.value = 9  # Each call sets it.
    assert guards.changed(model) is None
    assert not any(guard.key == "value" for guard in guards.read)


class SetsOnce(Narrow):
    """What it sets depends on what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.collector, self.fresh = Collector(), True

    def number(self) -> float:
        if self.fresh:
            self.collector.value = 5
        return self.collector.value


def test_what_a_write_depends_on_is_guarded() -> None:
    model, x = SetsOnce(), torch.randn(3, 4)
    guards = trace(model, (x,), device="cpu").reads
    assert model.collector.value == 0
    model.collector.value = 7
    assert guards.changed(model) is None
    model.fresh = False
    assert guards.changed(model) == "model.fresh was True when traced and is False"
    guards = trace(model, (x,), device="cpu").reads
    model.collector.value = 8
    assert guards.changed(model) == "model.collector.value was 7 when traced and is 8"


class CountsInVariables(Narrow):
    def number(self) -> float:
        global COUNT
        COUNT += 1
        TABLE["calls"] += 1
        return COUNT + TABLE["calls"]


def test_variables_that_a_trace_changes_are_put_back_and_warned_of() -> None:
    model, x = CountsInVariables(), torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"changes .*TABLE, .*COUNT when it is called"):
        guards = trace(model, (x,), device="cpu").reads
    assert COUNT == 0 and TABLE == {"calls": 0}
    assert guards.changed(model) is None
    model(x)
    assert (guards.changed(model) or "").startswith(f"{__name__}.")


def _calls(rank: int, world: int) -> tuple[list[float], list[float], int]:
    """Results of a parallel model and of the plain one, called in turns, and the number of programs."""
    torch.manual_seed(0)
    plain, batches = Collects(), torch.randn(3, 4, 4)
    model = autopar.parallelize(Collects(), (world,), mode="inference")
    model.load_state_dict(plain.state_dict())
    found, wanted = [], []
    for batch in batches:
        found.append(model(batch).item())
        wanted.append(plain(batch).item())
    return found, wanted, len(model.programs())


def test_calls_of_the_plain_model_in_between_make_no_program() -> None:
    for found, wanted, programs in run_local(_calls, 2, timeout=200):
        assert found == pytest.approx(wanted) and programs == 1
