"""A training on emulated hosts of which one disappears: the others notice, plan for what is left, and go on.

    sudo python -m benchmarks.elastic_hosts [--hosts 3] [--output FILE]

``autopar run --nnodes 1:3`` starts ``examples/train_elastic.py`` on each host (:mod:`.emulated_hosts`), two processes
each, with the options that users have. After some steps the link of the last host goes down: nobody is told. Written:
the seconds until a rank of the others named the host, and until the next step on the hosts that are left, the steps
that were done again, and how far losses are from those of one process that nothing disturbs.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .emulated_hosts import PORT, emulated_hosts, freeze, host_name, start_on_host
from .report import describe_machine

RESULTS = Path(__file__).with_name("results") / "elastic_hosts.json"
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_elastic.py"
PER_HOST, MEGABITS = 2, 1000
# Steps between checkpoints, before the host disappears, and after it.
EVERY, BEFORE, AFTER = 5, 23, 15
# Seconds after which something that should happen does not: starting, restarting, ending.
LIMIT = 300.0


def steps_of(log: Path) -> list[dict[str, float]]:
    """What the first rank has logged, without a line that is being written."""
    lines = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def wait_until(condition: Callable[[], object], what: str) -> float:
    """The time at which it was so."""
    deadline = time.time() + LIMIT
    while not condition():
        if time.time() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT:g} s")
        time.sleep(0.1)
    return time.time()


def words_for(folder: Path, log: Path) -> list[str]:
    """The example and its arguments."""
    return [str(EXAMPLE), "--folder", str(folder), "--log", str(log), "--every", str(EVERY), "--steps", "100000"]


def disturbed(folder: Path, hosts: int) -> dict[str, Any]:
    """The figures of a run whose last host disappears, and its steps."""
    log, outputs = folder / "log", [folder / f"host{index}.txt" for index in range(hosts)]
    options = ["--nnodes", f"1:{hosts}", "--nproc", str(PER_HOST), "--max-restarts", "10", "--grace", "10"]
    command = [sys.executable, "-m", "autopar", "run", *options, "--rendezvous", f"{host_name(0)}:{PORT}"]
    launchers: list[subprocess.Popen[bytes]] = []
    with emulated_hosts(hosts, MEGABITS):
        try:
            for index, path in enumerate(outputs):
                with path.open("w") as output:
                    launchers.append(start_on_host(index, [*command, *words_for(folder / "saved", log)], output))
            whole = hosts * PER_HOST
            wait_until(lambda: count_on(whole, log) >= BEFORE, f"{BEFORE} steps on {whole} processes")
            freeze(hosts - 1)
            cut, before = time.time(), len(steps_of(log))
            named = wait_until(lambda: fault_in(outputs[:-1]), "a message about the host")
            left = whole - PER_HOST
            wait_until(lambda: count_on(left, log) >= AFTER, f"{AFTER} steps on {left} processes")
            launchers[0].send_signal(signal.SIGTERM)
            launchers[0].wait(LIMIT)
        finally:
            for launcher in launchers:
                launcher.kill()
            for launcher in launchers:
                launcher.wait()
    return {**figures(steps_of(log), before, cut), "seconds_until_named": named - cut, "said": fault_in(outputs[:-1])}


def count_on(processes: int, log: Path) -> int:
    """The latest steps in a row on so many processes."""
    latest = [line["processes"] == processes for line in steps_of(log)]
    return latest[::-1].index(False) if False in latest else len(latest)


def fault_in(outputs: Sequence[Path]) -> str:
    """The first line about a fault that a rank wrote."""
    found = (re.search(r"FaultError: (.*)", path.read_text(errors="replace")) for path in outputs)
    return next((match[1] for match in found if match), "")


def figures(lines: Sequence[dict[str, float]], before: int, cut: float) -> dict[str, Any]:
    """Of steps of which so many were done before the host disappeared, at the time ``cut``. A step that was ending may
    come after it."""
    on = [line["processes"] for line in lines]
    first = next(place for place in range(before, len(lines)) if on[place] != on[0])
    last, again = lines[first - 1], lines[first]
    return {
        "processes": [int(on[0]), int(again["processes"])],
        "steps": len(lines),
        "steps_done_again": int(last["step"] - again["step"]) + 1,
        "seconds_to_the_next_step": again["time"] - cut,
        "lines": list(lines),
    }


def alone(folder: Path, steps: int) -> dict[int, float]:
    """The losses of one process that nothing disturbs."""
    log = folder / "alone"
    words = [*words_for(folder / "apart", log)[:-1], str(steps)]
    subprocess.run([sys.executable, "-m", "autopar", "run", "--nproc", "1", *words], check=True, timeout=LIMIT)
    return {int(line["step"]): line["loss"] for line in steps_of(log)}


def measure(hosts: int = 3) -> dict[str, Any]:
    """The figures."""
    with tempfile.TemporaryDirectory() as name:
        found = disturbed(Path(name), hosts)
        lines = found.pop("lines")
        expected = alone(Path(name), int(max(line["step"] for line in lines)) + 1)
    errors = [abs(line["loss"] / expected[int(line["step"])] - 1) for line in lines]
    return {"hosts": hosts, **found, "every_step_done": len({line["step"] for line in lines}) == len(expected),
            "largest_difference_of_losses": max(errors), "last_loss": lines[-1]["loss"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--output", default=str(RESULTS))
    arguments = parser.parse_args()
    found = {"benchmark": "elastic_hosts", "machine": describe_machine(), **measure(arguments.hosts)}
    text = json.dumps(found, indent=1) + "\n"
    Path(arguments.output).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
