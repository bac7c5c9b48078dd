"""Ranks of one program: one traces, the others take its trace, and its errors."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.launch import run_local
from autopar.trace.cache import cache as trace_cache
from autopar.trace.capture import Request
from autopar.trace.tracer import Traced, traced_request


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "traces"


def _first_step(rank: int, world: int, kind: str) -> tuple[float, list[torch.Tensor], int]:
    """Loss and gradients of a step, and how many traces this rank made itself."""
    torch.manual_seed(0)
    made: list[Request] = []

    def counted(request: Request) -> Traced:
        made.append(request)
        return traced_request(request)

    trace_cache.traced_request = counted  # type: ignore[attr-defined]
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    if kind == "unequal":
        model.rank = rank  # type: ignore[assignment]
    parallel = autopar.parallelize(model, (world,), loss_fn=lambda output: output.square().mean())
    loss = parallel.step(torch.arange(32.0).reshape(8, 4) / 32)
    gradients = [parallel.full_tensor(p.grad) for p in parallel.parameters()]
    return float(loss), gradients, len(made)


@pytest.mark.parametrize(("kind", "expected"), [("equal", [1, 0]), ("kept", [0, 0]), ("unequal", [1, 1])])
def test_one_rank_traces_for_all(kind: str, expected: list[int]) -> None:
    if kind == "kept":
        run_local(_first_step, 2, timeout=200, args=("equal",))
    found = run_local(_first_step, 2, timeout=200, args=(kind,))
    assert [made for _, _, made in found] == expected
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    loss = model(torch.arange(32.0).reshape(8, 4) / 32).square().mean()
    loss.backward()
    for own, gradients, _ in found:
        assert own == pytest.approx(loss.item(), rel=1e-5)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way")


def _fail(rank: int, world: int) -> str:
    try:
        autopar.parallelize(Broken(), (world,), example_inputs=torch.ones(4, 4))
    except autopar.AutoparError as error:
        return str(error)
    return ""


def test_an_error_of_the_rank_that_traces_reaches_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_local(_fail, 2, timeout=100)
    assert all("no way" in text for text in found) and found[0] == found[1]
