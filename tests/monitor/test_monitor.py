"""A monitor writes what a training does, on one and on two processes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import FaultError, OptionsError
from autopar.monitor import Monitor, StepRecord, outputs
from autopar.monitor.measure import Measured, straggler, waiting_seconds
from tests.helpers.models import Stack, text
from tests.helpers.planning import CLUSTER, on

SLOW = 0.15


def monitored(rank: int, folder: str) -> list[StepRecord | None]:
    """Six steps of which rank 1 is late for the last three."""
    batch = text(8, 8)
    model = autopar.parallelize(Stack(), (2,), batch, cluster=CLUSTER)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    records = []
    with Monitor(model, folder=folder, tensorboard=False, progress=False, tokens=64) as monitor:
        for step in range(6):
            if rank == 1 and step > 2:
                time.sleep(SLOW)
            optimizer.zero_grad()
            loss = model.step(**batch)
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            records.append(monitor.step(loss, gradient_norm=norm))
    return records


def test_two_processes(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> None:
        records = monitored(rank, str(tmp_path))
        late = records[4]
        assert late is not None and late.waiting_seconds is not None
        assert late.seconds > SLOW and late.waiting_seconds[0] > SLOW / 2 > late.waiting_seconds[1]
        assert late.straggler == 1

    on(2, work)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    assert lines[5]["loss"] < lines[0]["loss"]
    assert [line.get("first_of_run") for line in lines] == [True, *[None] * 5]
    for line in lines:
        assert line["tokens_per_second"] == pytest.approx(64 / line["seconds"])
        assert line["predicted_seconds"] > 0 and line["predicted_bytes"] > 0 and line["mfu"] > 0
        assert line["memory_bytes"] > 1e8 and line["gradient_norm"] > 0
        assert len(line["waiting_seconds"]) == 2


def test_who_others_wait_for() -> None:
    assert straggler((4, 5, 6), (0.5, 0.01, 0.4), 1.0) == 5
    assert straggler((4, 5, 6), (0.5, 0.45, 0.52), 1.0) is None
    assert straggler((4,), (0.5,), 1.0) is None
    assert straggler((4, 5), None, 1.0) is None


def test_measurements_are_as_long_on_every_rank() -> None:
    some, none = Measured(1.5, 2e9, 0.25), Measured(1.5, 2e9, None)
    assert len(some.to_bytes()) == len(none.to_bytes())
    assert Measured.from_bytes(some.to_bytes()) == some
    assert waiting_seconds([some, none]) is None


def test_what_is_not_a_number_is_written_as_text(tmp_path: Path) -> None:
    file = outputs.JsonLines(tmp_path / "deep" / "steps.jsonl")
    file.write(StepRecord(0, math.nan, 1.0, gradient_norm=math.inf))
    file.close()
    line = json.loads((tmp_path / "deep" / "steps.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 0, "loss": "nan", "seconds": 1.0, "gradient_norm": "inf"}


def test_a_line_for_the_terminal() -> None:
    record = StepRecord(3, 2.5, 0.2, predicted_seconds=0.1, tokens_per_second=5e4, mfu=0.4, straggler=2)
    assert outputs.in_short(record) == (
        "loss 2.5   200 ms a step (predicted 100)   50,000 tokens/s   MFU 40%   waiting for rank 2"
    )


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"what autopar.parallelize returned, not a Linear"):
        Monitor(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    monkeypatch.setattr(outputs, "has_tensorboard", lambda: False)
    with pytest.raises(OptionsError, match=r'pip install "autopar\[tensorboard\]"'):
        outputs.TensorBoard(tmp_path)


@pytest.mark.slow
def test_a_rank_that_does_not_take_part_is_named() -> None:
    def work(rank: int, world: int) -> None:
        batch = text(8, 8)
        model = autopar.parallelize(Stack(), (2,), batch, cluster=CLUSTER)
        monitor = Monitor(model, progress=False)
        with pytest.raises(FaultError, match=r"rank 0 .*monitor.step\(\)"):
            for _ in range(3):
                loss = model.step(**batch)
                if rank == 0:
                    monitor.step(loss)

    on(2, work)
