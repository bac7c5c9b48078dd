"""examples/submitit_train.py with submitit's local executor: a job that is preempted, and put into the queue again."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.house.sources import ROOT

from .small_models import together

pytest.importorskip("submitit", reason="needs submitit: pip install submitit")

STEPS = 100


def lines_of(folder: Path) -> list[dict[str, Any]]:
    log = folder / "log"
    # A line that is being written has no end yet.
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []


def undisturbed(rank: int, world: int, folder: Path) -> None:
    from examples import submitit_train

    folder.mkdir(exist_ok=True)
    submitit_train.train(str(folder), STEPS, 8, 100)


@pytest.mark.slow
def test_a_preempted_job_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import submitit_train

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    folder, alone = tmp_path / "job", tmp_path / "alone"
    words = ["--folder", str(folder), "--cluster", "local", "--steps", str(STEPS), "--batch", "8", "--every", "100"]
    folder.mkdir()
    job = submitit_train.submit(submitit_train.parser().parse_args(words))
    deadline = time.monotonic() + 200
    while len(lines_of(folder)) < 5:
        assert time.monotonic() < deadline and not job.done(), job.stderr()
        time.sleep(0.01)
    os.kill(lines_of(folder)[-1]["process"], signal.SIGUSR2)  # As SLURM does; that of one task is enough.
    job.results()
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)], "every step once: it was saved where it stopped"
    assert len({line["process"] for line in lines}) == 2, "the job was put into the queue again"
    together(2, undisturbed, alone)
    wanted = [line["loss"] for line in lines_of(alone)]
    assert [line["loss"] for line in lines] == pytest.approx(wanted, rel=1e-5)
