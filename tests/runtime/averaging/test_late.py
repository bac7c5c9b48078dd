"""A replica that is late: with ``staleness`` it holds up no other until it is later than that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar import LocalSGD, Options
from autopar.runtime import run_local
from tests.runtime.averaging.training import Weights, assert_same, batches, made, whole

EVERY, STALENESS = 6, 4


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Until another process has made ``path``."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.01)


def test_a_late_replica_delays_no_other_until_it_is_later_than_allowed(tmp_path: Path) -> None:
    data = batches(EVERY + STALENESS)

    def work(rank: int, world: int) -> tuple[Weights, Weights, list[bool]]:
        model = autopar.parallelize(
            made(), (2,), data[0], options=Options(sync=LocalSGD(every=EVERY, staleness=STALENESS, mix=0.0))
        )
        optimizer: Any = model.optimizer(torch.optim.AdamW, lr=0.01)
        began, sent = [], Weights()
        for step, batch in enumerate(data, 1):
            if rank == 1 and step == EVERY:
                # Comes to the exchange only when the other is three steps ahead of it, which therefore has not waited.
                wait_for(tmp_path / f"step {EVERY + STALENESS - 1} of 0")
            optimizer.zero_grad()
            model.step(**batch)
            if rank == 1 and step == EVERY:
                (tmp_path / "began").touch()
            optimizer.step()
            if step == EVERY:
                sent = whole(model)
            (tmp_path / f"step {step} of {rank}").touch()
            began.append((tmp_path / "began").exists())
        return sent, whole(model), began

    (first, ended, began), (second, _, _) = run_local(work, 2, timeout=120.0, backend="gloo")
    # The first replica went ahead, and after its last step has waited for the other, to take the mean.
    assert not any(began[: EVERY + STALENESS - 2]) and began[-1]
    assert_same([ended], [{name: (first[name] + second[name]) / 2 for name in first}])
