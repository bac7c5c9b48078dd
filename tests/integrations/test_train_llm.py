"""examples/train_llm.py learns, and goes on from its checkpoint as if it had not stopped."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from .small_models import together


def run(rank: int, world: int, folder: Path, steps: int) -> float:
    from examples import train_llm

    return train_llm.train(argparse.Namespace(folder=str(folder), steps=steps, batch=16, every=4))


def losses_of(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_whole_training_learns_and_resumes(tmp_path: Path) -> None:
    final = together(2, run, tmp_path / "once", 12)
    losses = losses_of(tmp_path / "once")
    assert len(losses) == 12 and final < losses[0] - 0.5
    # The schedule depends on the number of steps, so the second run is cut by its checkpoint alone.
    for later in (tmp_path / "once").glob("step-000012"):
        later.rename(tmp_path / "put-away")
    assert together(2, run, tmp_path / "once", 12) == pytest.approx(final, rel=1e-4)
    again = losses_of(tmp_path / "once")[12:]
    assert again == pytest.approx(losses[8:], rel=1e-4)
