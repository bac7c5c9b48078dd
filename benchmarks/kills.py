"""Kills a training at random moments, again and again, under ``autopar run``: what is lost, and for how long.

``python -m benchmarks.kills [--kills 20] [--ranks 2] [--seconds S] [--resume]`` sends SIGKILL to a random rank at a
random moment after the training has begun or gone on (in a step, in a save, while it loads), and writes
``benchmarks/results/kills.json``: kills survived, steps lost, seconds from a kill to the next step, and whether every
loss is that of an undisturbed run. ``--resume`` adds a run to those of the file, at other random moments: a hundred
kills take some twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
SCRIPT = Path(__file__).with_name("killed_training.py")
# Steps between two checkpoints, and the most steps between two kills.
EVERY, BETWEEN = 10, 40
# Seconds after which a training that does not go on has not survived.
LIMIT = 120.0


@dataclass(frozen=True)
class Kill:
    """``lost``: steps done before it that were done again; ``seconds`` from it to the next step."""

    lost: int
    seconds: float


class Training:
    """A run of the script in ``folder``."""

    def __init__(self, folder: Path, ranks: int, steps: int, restarts: int) -> None:
        self.folder = folder
        folder.mkdir()
        command = [sys.executable, "-m", "autopar", "run", "--nproc", str(ranks), "--max-restarts", str(restarts)]
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*command, str(SCRIPT), str(folder), str(steps), str(EVERY)], stdout=output, stderr=output
            )

    def lines(self) -> list[dict[str, float]]:
        """The steps done so far, without a line that is being written."""
        text = (self.folder / "log").read_text() if (self.folder / "log").exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def wait_for(self, lines: int) -> bool:
        """Waits until so many steps were done; False if it ended before, or takes too long."""
        deadline = time.monotonic() + LIMIT
        while len(self.lines()) < lines and time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        return len(self.lines()) >= lines

    def kill(self, rank: int) -> Kill | None:
        """Kills a rank; None if the training did not go on."""
        before, now = len(self.lines()), time.time()
        with suppress(ProcessLookupError):
            os.kill(int((self.folder / f"pid{rank}").read_text()), signal.SIGKILL)
        while True:
            if not self.wait_for(before + 1):
                return None
            done, after = self.lines()[:before], self.lines()[before]
            if after["step"] <= done[-1]["step"]:
                return Kill(int(done[-1]["step"] - after["step"]) + 1, after["time"] - now)
            before += 1  # A step that was just ending.


def disturbed(
    folder: Path, ranks: int, kills: int, seconds: float, source: random.Random
) -> tuple[list[Kill | None], dict[int, set[float]]]:
    """The kills within so many seconds, None for one that was not survived, and all losses that were seen of each
    step."""
    training, found = Training(folder, ranks, kills * BETWEEN, kills), list[Kill | None]()
    deadline = time.monotonic() + seconds
    try:
        while len(found) < kills and time.monotonic() < deadline:
            if not training.wait_for(len(training.lines()) + source.randrange(1, BETWEEN // 2)):
                break
            time.sleep(source.uniform(0.0, 0.05))
            found.append(training.kill(source.randrange(ranks)))
            if found[-1] is None:
                break
        training.process.wait(LIMIT)
    finally:
        training.process.kill()
    return found, losses_of(training)


def losses_of(training: Training) -> dict[int, set[float]]:
    """All losses of each step."""
    found: dict[int, set[float]] = {}
    for line in training.lines():
        found.setdefault(int(line["step"]), set()).add(line["loss"])
    return found


def measure(kills: int, ranks: int, seed: int = 0, seconds: float = float("inf")) -> dict[str, Any]:
    """What a run with so many kills, or those of so many seconds, comes to."""
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Training(Path(name, "undisturbed"), ranks, kills * BETWEEN, 0)
        undisturbed.process.wait(10 * LIMIT)
        found, losses = disturbed(Path(name, "disturbed"), ranks, kills, seconds, random.Random(seed))
        survived = [kill for kill in found if kill is not None]
        return {
            "seed": seed,
            "kills": len(found),
            "ranks": ranks,
            "lost": [kill.lost for kill in survived],
            "seconds": [round(kill.seconds, 2) for kill in survived],
            "equal_losses": losses == losses_of(undisturbed),
        }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The figures of all runs together."""
    lost, seconds = [each for run in runs for each in run["lost"]], [each for run in runs for each in run["seconds"]]
    return {
        "kills": sum(run["kills"] for run in runs),
        "ranks": runs[0]["ranks"],
        "survived": len(lost),
        "steps_between_checkpoints": EVERY,
        "steps_lost": {"mean": round(statistics.mean(lost), 1), "most": max(lost)} if lost else {},
        "seconds_to_the_next_step": (
            {"median": round(statistics.median(seconds), 1), "most": round(max(seconds), 1)} if seconds else {}
        ),
        "equal_losses": all(run["equal_losses"] for run in runs),
        "runs": list(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more are killed")
    parser.add_argument("--resume", action="store_true", help="adds to the runs of the file")
    arguments, path = parser.parse_args(), RESULTS / "kills.json"
    runs = json.loads(path.read_text()).get("runs", []) if arguments.resume and path.exists() else []
    runs.append(measure(arguments.kills, arguments.ranks, len(runs), arguments.seconds))
    text = json.dumps(summary(runs), indent=1)
    print(text)
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
