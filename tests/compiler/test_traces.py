"""A length that varies is traced twice: as it is at first, and then open for all lengths."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler import calls
from autopar.planner.prepare import prepare
from autopar.trace.cache import cache
from autopar.trace.lengths import Lengths
from tests.helpers.planning import on


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many lengths were to be left open in each trace that was made."""
    asked: list[int] = []

    def counted(*args: Any, lengths: Lengths = (), **kwargs: Any) -> Any:
        asked.append(len(lengths))
        return prepare(*args, lengths=lengths, **kwargs)

    monkeypatch.setattr(calls, "prepare", counted)
    yield asked


class Reader(nn.Module):
    """``mixes``: another program for texts of 7."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 6), nn.Linear(6, 6)
        self.mix = nn.Parameter(torch.linspace(0, 1, 7)) if mixes else None

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.out(self.table(ids)))
        if self.mix is not None and len(self.mix) == ids.shape[1]:
            hidden = hidden * self.mix[:, None]
        return (hidden.cumsum(1).square().mean(-1) * weight).mean()


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(20, (rows, length), generator=torch.Generator().manual_seed(length))
    return ids, torch.linspace(0, 1, length).expand(rows, length).contiguous()


def check(model: nn.Module, reference: nn.Module, rows: int, length: int) -> None:
    wanted = reference(*batch(rows, length))
    wanted.backward()
    torch.testing.assert_close(model.step(*batch(rows, length)), wanted.detach())  # type: ignore[operator]
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert found.grad is not None or expected.grad is None
        if expected.grad is not None:
            torch.testing.assert_close(model.full_tensor(found.grad), expected.grad)  # type: ignore[operator]
    model.zero_grad()
    reference.zero_grad()


def test_a_length_is_left_open_when_it_varies(traced: list[int]) -> None:
    reference = Reader()
    model = autopar.parallelize(copy.deepcopy(reference), (1,))
    for length in (7, 9, 5, 12):
        check(model, reference, 4, length)
    check(model, reference, 3, 6)
    assert traced == [0, 2], "both inputs"
    with torch.no_grad():
        for length in (7, 9, 5):
            torch.testing.assert_close(model(*batch(4, length)), reference(*batch(4, length)))
    assert traced[2:] == [0, 2], "a call without gradients is another"


def test_a_length_that_fails_at_one_size_is_opened_at_the_next(traced: list[int]) -> None:
    reference = Reader(mixes=True)
    model = autopar.parallelize(copy.deepcopy(reference), (1,))
    for length in (9, 7, 5, 7, 12):
        check(model, reference, 4, length)
    assert traced == [0, 2, 0, 2], "the attempt at 7 fails, and that at 5 serves all others"


class Looping(Reader):
    """Its loop is another program for each length."""

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(ids.shape[0], 6)
        for position in range(ids.shape[1]):
            state = torch.tanh(state + self.out(self.table(ids[:, position])))
        return state.square().mean() + weight.mean()


def test_a_length_that_the_model_fixes_is_tried_twice(traced: list[int]) -> None:
    reference = Looping()
    model = autopar.parallelize(copy.deepcopy(reference), (1,))
    for length in (9, 7, 5, 7, 12, 10):
        check(model, reference, 4, length)
    assert traced == [0, 2, 0, 2, 0, 0, 0], "the attempts at 7 and 5 are the only ones"


def test_a_guard_on_both_the_length_and_the_batch_is_heard(
    traced: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the trace with the length open is that of an earlier run."""

    class Counting(Reader):
        def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            loss = super().forward(ids, weight)
            return loss.cos() if ids.shape[0] * ids.shape[1] > 100 else loss

    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    torch.manual_seed(0)
    reference = Counting()
    for lengths in ((16, 20, 30, 18), (16, 30, 20)):
        cache.forget()
        model = autopar.parallelize(copy.deepcopy(reference), (1,))
        for length in lengths:
            check(model, reference, 4, length)


def test_ranks_share_what_is_open() -> None:
    def work(rank: int, world: int) -> None:
        torch.manual_seed(0)
        reference = Reader()
        model = autopar.parallelize(copy.deepcopy(reference), (2,))
        for length in (7, 9, 5):
            check(model, reference, 4, length)

    on(2, work)
