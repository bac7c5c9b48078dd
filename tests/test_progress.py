"""What a first step is waiting for is said on a terminal, by the first process, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.progress import LONG, shown

PROGRAM = """
import torch, autopar
from autopar import progress
progress.LONG = 0.0
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
parallel = autopar.parallelize(model, (1,), loss_fn=torch.nn.functional.mse_loss)
loss = parallel.step(torch.zeros(4, 8), targets=torch.ones(4, 8))
"""


def _stderr(tmp_path: Path, *, terminal: bool, rank: str) -> str:
    """What the program writes to standard error."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "AUTOPAR_CACHE": "off", "OMP_NUM_THREADS": "1", "RANK": rank}
    command = [sys.executable, "-W", "ignore", str(program)]
    if not terminal:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # The other end is closed.
                break
        assert process.wait(120) == 0
    os.close(ours)
    return written.decode()


def test_phases_are_shown_on_a_terminal(tmp_path: Path) -> None:
    text = _stderr(tmp_path, terminal=True, rank="0")
    phases = re.findall(r"autopar: ([a-z0-9 ]+)  \d+\.\d s", text)
    assert phases == [
        "tracing the model",
        "planning for 1 devices",
        "lowering the step",
        "compiling the program",
    ]


@pytest.mark.slow
def test_nothing_is_written_to_a_pipe(tmp_path: Path) -> None:
    assert "tracing" not in _stderr(tmp_path, terminal=False, rank="0")


class Terminal:
    """A standard error that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.mark.parametrize(("rank", "lines"), [("0", True), ("1", False)])
def test_only_the_first_process_writes(rank: str, lines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("RANK", rank)
    with shown("resting"):
        pass
    assert ("autopar: resting …" in terminal.text) is lines
    # It was quick, so the line is gone.
    assert LONG > 0.1 and terminal.text.endswith("\r\x1b[K" if lines else "")
    assert " s\n" not in terminal.text
