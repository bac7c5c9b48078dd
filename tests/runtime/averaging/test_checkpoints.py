"""Replicas that were saved go on to the bit."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import DiLoCo, Gossip, LocalSGD, Options, PowerSGD, TopK, checkpoint
from autopar.runtime import run_local
from tests.runtime.averaging.training import Weights, batches, made, whole
from tests.runtime.checkpoint.training import Tied as Dropping
from tests.runtime.checkpoint.training import batch_of


def resumed(sync: Any, folder: Path, mesh: tuple[int, ...], kind: Any, data: list[Any], **options: Any) -> list[Any]:
    """What each rank has after all batches: without a break, and saved and loaded in the middle."""
    middle = len(data) // 2

    def start() -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
        settings = Options(sync=sync, seed=4, **options)
        model = autopar.parallelize(made(kind), mesh, data[0], options=settings)
        return model, model.optimizer(torch.optim.AdamW, lr=0.01)

    def train(model: autopar.ParallelModule, optimizer: torch.optim.Optimizer, part: list[Any]) -> None:
        for batch in part:
            optimizer.zero_grad()
            model.step(**batch)
            optimizer.step()

    def work(rank: int, world: int) -> tuple[Weights, Weights]:
        model, optimizer = start()
        train(model, optimizer, data[:middle])
        checkpoint.save(folder, model, optimizer, step=middle)
        train(model, optimizer, data[middle:])
        straight = whole(model)
        model, optimizer = start()
        assert checkpoint.load(folder, model, optimizer).step == middle
        train(model, optimizer, data[middle:])
        return straight, whole(model)

    return run_local(work, math.prod(mesh), timeout=120.0, backend="gloo")


@pytest.mark.parametrize(
    "sync, mesh, options",
    [
        (DiLoCo(every=4, fragments=2, delay=2), (2,), {}),
        pytest.param(LocalSGD(every=3), (2,), {}, marks=pytest.mark.slow),
        pytest.param(LocalSGD(every=3, compression=TopK(0.2)), (2,), {}, marks=pytest.mark.slow),
        pytest.param(DiLoCo(every=3, compression="int8"), (2, 2), {"zero": 3}, marks=pytest.mark.slow),
        pytest.param(LocalSGD(every=3, compression=PowerSGD(1)), (2,), {}, marks=pytest.mark.slow),
        pytest.param(
            DiLoCo(every=3, delay=1, outer=partial(torch.optim.Adam, lr=0.05)),
            (2, 2),
            {"stages": 2, "microbatches": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(Gossip("exponential"), (4,), {}, marks=pytest.mark.slow),
        pytest.param(Gossip(compression="int8"), (2,), {}, marks=pytest.mark.slow),
    ],
)
def test_they_go_on_to_the_bit(sync: Any, mesh: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    """Saved between exchanges, with one in flight."""
    outcomes = resumed(sync, tmp_path, mesh, Dropping, [{"ids": batch_of(step)} for step in range(10)], **options)
    for straight, again in outcomes:
        for name, value in straight.items():
            assert torch.equal(again[name], value), name
    first, last = outcomes[0][0], outcomes[-1][0]
    assert any(not torch.equal(value, last[name]) for name, value in first.items())


def test_other_replicas_begin_from_the_first(tmp_path: Path) -> None:
    """On one process without replicas, and as replicas that exchange otherwise."""
    data = batches(5)

    def save(rank: int, world: int) -> Weights:
        model = autopar.parallelize(made(), (2,), data[0], options=Options(sync=LocalSGD(every=2)))
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
        for batch in data:
            optimizer.zero_grad()
            model.step(**batch)
            optimizer.step()
        checkpoint.save(tmp_path, model, optimizer, step=len(data))
        return whole(model)

    saved = run_local(save, 2, timeout=120.0, backend="gloo")[0]

    def load(rank: int, world: int) -> Weights:
        model = autopar.parallelize(made(), (2,), data[0], options=Options(sync=DiLoCo(every=2)))
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
        with pytest.warns(UserWarning, match="2 replicas on 2 ranks, LocalSGD"):
            checkpoint.load(tmp_path, model, optimizer)
        return whole(model)

    plain = made()
    checkpoint.load(tmp_path, plain)
    for found in (*run_local(load, 2, timeout=120.0, backend="gloo"), plain.state_dict()):
        assert all(torch.equal(found[name], value) for name, value in saved.items())
