"""What is beside weights and optimizer: the scale of fp16's loss, and state that rests in host memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import checkpoint
from autopar.options import Options
from tests.helpers.planning import on

from .training import Run, assert_equal, batch_of, parallel, reference, run

BEFORE, AFTER = 5, 8
SHARDED: dict[str, Any] = {"zero": 3, "stages": 1}
STAGED: dict[str, Any] = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}
Trace = tuple[list[float], list[dict[str, Any]], dict[str, torch.Tensor]]


def goes_on(made: Run) -> Trace:
    """Losses and scales of the steps that follow, and all values after them."""
    losses, scales = list[float](), list[dict[str, Any]]()
    for step in range(BEFORE, BEFORE + AFTER):
        losses += made.steps([step])
        scales.append(dict(made.model.loss_scale_state() or {}))
    return losses, scales, made.whole()


def restored(folder: Path, made: Run) -> Run:
    checkpoint.load(folder, made.model, made.optimizer, scheduler=made.scheduler)
    return made


def test_the_scale_of_the_loss_goes_on(tmp_path: Path) -> None:
    """It is saved between two of its changes: it falls and rises afterwards as if nothing had been."""

    def work(rank: int, world: int) -> list[Trace]:
        made = parallel((world,), precision="fp16", **SHARDED)
        made.model.set_loss_scale_state({**made.model.loss_scale_state(), "scale": 2.0**21, "growth_interval": 2})
        made.steps(range(BEFORE))
        checkpoint.save(tmp_path, made.model, made.optimizer, scheduler=made.scheduler, step=BEFORE)
        saved = made.model.loss_scale_state()
        staged = restored(tmp_path, parallel((world,), precision="fp16", **STAGED))
        assert staged.model.loss_scale_state() == saved  # It overflows elsewhere: microbatches have smaller gradients.
        return [goes_on(made), goes_on(restored(tmp_path, parallel((world,), precision="fp16", **SHARDED)))]

    for wanted, found in on(2, work):
        sizes = [state["scale"] for state in wanted[1]]
        changes = [after / before for before, after in itertools.pairwise(sizes)]
        assert {0.5, 2.0} <= set(changes), sizes
        assert found[:2] == wanted[:2]
        assert_equal(found[2], wanted[2])


@pytest.mark.slow
def test_state_in_host_memory_goes_on(tmp_path: Path) -> None:
    """Saved from host memory and loaded into it, and into a plan without."""

    def work(rank: int, world: int) -> list[Trace]:
        def made(offload: bool) -> Run:
            options = Options(seed=3, offload=offload, **SHARDED)
            example = (batch_of(0),)
            model = autopar.parallelize(reference(), (world,), example, options=options, cluster="dgx-a100-80gb")
            assert {bool(place.offload) for place in model.plan.parameters.values()} == {offload}
            return run(model)

        first = made(True)
        first.steps(range(BEFORE))
        checkpoint.save(tmp_path, first.model, first.optimizer, scheduler=first.scheduler, step=BEFORE)
        return [goes_on(first), *(goes_on(restored(tmp_path, made(offload))) for offload in (True, False))]

    for wanted, same, other in on(2, work):
        for found in (same, other):
            assert found[0] == wanted[0]
            assert_equal(found[2], wanted[2])
