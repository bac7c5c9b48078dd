"""Training that loses hosts, and gains some: with the launcher, the checkpoints and the example that users have."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.house.sources import ROOT

STEPS, EVERY = 400, 10
# The example, with steps as long as those of a real model: hosts come and go while it trains.
SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from examples import train_elastic
report = train_elastic.report
def slowly(*words):
    report(*words)
    time.sleep(0.25)
train_elastic.report = slowly
train_elastic.main()
"""


def lines_of(log: Path) -> list[dict[str, float]]:
    """What rank 0 has logged, without a line that is being written."""
    lines = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {seconds} s"
        time.sleep(0.2)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts hosts of two processes that meet at one port, and stops those that are left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "autopar", "run", "--nnodes", "1:4", "--nproc", "2"]
        command += ["--rendezvous", f"127.0.0.1:{port}", "--max-restarts", "10", str(script)]
        command += ["--folder", str(tmp_path / "checkpoints"), "--log", str(tmp_path / "log")]
        command += ["--steps", str(STEPS), "--every", str(EVERY)]
        with open(tmp_path / f"host{len(running)}.txt", "wb") as output:
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def one_process(folder: Path) -> list[float]:
    """The losses of a run that nothing disturbs."""
    log = folder / "alone"
    script = "examples/train_elastic.py"
    command = [sys.executable, "-m", "autopar", "run", "--nproc", "1", script, "--folder", str(folder / "apart")]
    subprocess.run([*command, "--log", str(log), "--steps", str(STEPS)], cwd=ROOT, check=True, timeout=240)
    return [line["loss"] for line in lines_of(log)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_eight_six_four_and_eight_processes_train_as_one_does(
    hosts: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Three kills: a host of eight processes, a host of six, and, once two hosts have joined, one rank."""
    log = tmp_path / "log"

    def trains_on(processes: int, steps: int = 5) -> Callable[[], bool]:
        """Whether that many processes have done so many steps in a row."""

        def look() -> bool:
            latest = [line["processes"] for line in lines_of(log)[-steps:]]
            return latest == [processes] * steps

        return look

    first = hosts()
    time.sleep(3)  # The host that others meet at.
    others = [hosts() for _ in range(3)]
    wait_until(trains_on(8), 240, "eight processes train")
    for left, host in ((6, others[0]), (4, others[1])):
        host.send_signal(signal.SIGKILL)
        wait_until(trains_on(left), 240, f"{left} processes train")
    hosts()
    hosts()
    wait_until(trains_on(8), 240, "eight processes train again")
    kill_one_rank(first)
    wait_until(lambda: first.poll() is not None, 400, "the training ends")
    assert first.wait() == 0
    lines = lines_of(log)
    expected = one_process(tmp_path)
    for line in lines:
        assert line["loss"] == pytest.approx(expected[int(line["step"])], rel=1e-4), line
    assert {int(line["step"]) for line in lines} == set(range(STEPS))
    repeated = len(lines) - STEPS
    assert repeated <= 5 * (EVERY + 2)


def kill_one_rank(launcher: subprocess.Popen[bytes]) -> None:
    """Kills one of the launcher's ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert children
    subprocess.run(["kill", "-KILL", children[0]], check=True)


def run_example(folder: Path, log: Path, processes: int, steps: int, *words: str) -> list[dict[str, float]]:
    """The lines of a run to its end, from the newest checkpoint in ``folder``."""
    command = [sys.executable, "-m", "autopar", "run", "--nproc", str(processes), "examples/train_elastic.py"]
    command += ["--folder", str(folder), "--log", str(log), "--steps", str(steps), "--every", "3", *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    return lines_of(log)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["accumulated", "scaled"])
def test_the_global_batch_is_what_the_user_says(tmp_path: Path, how: str) -> None:
    """Four processes of three rows each, then two: the same as one process with as many rows at a time."""
    words = ("--global-batch", how, "--rows")
    alone = ("--global-batch", "kept") if how == "accumulated" else words
    for steps, processes in ((6, 4), (12, 2)):
        found = run_example(tmp_path / "some", tmp_path / "log", processes, steps, *words, "3")
        rows = () if how == "accumulated" else (str(3 * processes),)
        wanted = run_example(tmp_path / "one", tmp_path / "alone", 1, steps, *alone, *rows)
    assert [line["step"] for line in found] == list(range(12))
    assert [line["samples"] for line in found] == [line["samples"] for line in wanted]
    assert found[-1]["samples"] == (12 * 24 if how == "accumulated" else 6 * 12 + 6 * 6)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4), ours
