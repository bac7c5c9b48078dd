"""examples/ray_train.py on Ray's local cluster: a worker that is killed, and a run that goes on from the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.sources import ROOT

from .small_models import together

pytest.importorskip("ray", reason="needs Ray Train: pip install 'autopar[ray]'")

STEPS, EVERY, KILLED = 16, 4, 10
# The example's loop in two workers, of which the second is killed once, in the midst of training.
SCRIPT = f"""
import json, os, signal
from pathlib import Path

import ray
import ray.train

from examples import ray_train


def loop(config):
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()

    def report(figures):
        if rank == 0:
            with open(folder / "log", "a") as log:
                log.write(json.dumps(figures) + chr(10))
        if rank == 1 and figures["step"] == {KILLED} and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ray.train.report(figures)

    ray_train.train(config, report)


ray.init(num_cpus=2, include_dashboard=False)
ray_train.trainer_of(ray_train.parser().parse_args(), loop).fit()
"""


def undisturbed(rank: int, world: int, folder: Path) -> list[float]:
    from examples import ray_train

    losses: list[float] = []
    config = {"folder": str(folder), "steps": STEPS, "batch": 8, "every": EVERY}
    ray_train.train(config, lambda figures: losses.append(figures["loss"]))
    return losses


@pytest.mark.slow
def test_a_worker_is_killed_and_training_goes_on(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "ray"
    folder.mkdir()
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "--folder", str(folder), "--workers", "2"]
    command += ["--steps", str(STEPS), "--batch", "8", "--every", str(EVERY)]
    searched = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, cwd=ROOT, check=True, timeout=400, env={**os.environ, "PYTHONPATH": searched})
    assert (folder / "killed").exists()
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    again = steps.index(KILLED) + 1
    assert steps[:again] == [*range(1, KILLED + 1)] and steps[-1] == STEPS
    assert 1 < steps[again] <= KILLED, "goes on from a checkpoint, not from the beginning"
    wanted = together(2, undisturbed, tmp_path / "alone")
    assert {line["workers"] for line in lines} == {2}
    assert [line["loss"] for line in lines] == pytest.approx([wanted[step - 1] for step in steps], rel=1e-5)
