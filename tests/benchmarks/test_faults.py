"""The table of faults under ``autopar run`` (benchmarks/results/faults.json): each ends everywhere in time, and is
named. Quick ones are in tests/runtime/test_faults.py."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest

from benchmarks.faults import EVERYWHERE, FIRST, LAUNCHER, ONCE, STAGES, TIMEOUT, WHOLE, freeze_a_host, inject

# Seconds in addition to the timeout: starts of loaded machines, and the ten for which a process may unwind.
# Chosen.
SLACK = 35.0
# What the first line about each fault says.
SAID = {
    "SIGKILL": r"killed by SIGKILL|rank 2 died without a word",
    "SIGSEGV": r"killed by SIGSEGV|rank 2 died without a word",
    "SIGSTOP": r"rank 2 .* is stopped \(SIGSTOP\)",
    "os._exit": r"failed \(3\)|rank 2 died without a word",
    "exception": r"ValueError: an error of this rank",
    "MemoryError": r"MemoryError",
    "sys.exit(0)": r"the script of rank 2 came to its end after",
    "fewer batches": r"the script of rank 2 came to its end after",
    "full_tensor": r"rank 2 in model\.full_tensor\(\)",
    "full_params": r"rank 2 in model\.full_params\(\)",
    "clip_grad_norm_": r"rank 2 in model\.clip_grad_norm_\(\)",
    "DTensor.full_tensor": r"rank 2 outside of autopar at fault_training\.py",
    "sleep": r"rank 2 is outside of autopar at fault_training\.py",
    "late": r"rank 2 did not come to autopar\.parallelize",
    "deeper": r"rank 2 has another model",
    "wider": r"rank 2 has another model",
}
SAID |= {
    "SIGKILL of rank 0": r"killed by SIGKILL|rank 0 ended, killed or by an error",
    "SIGSTOP of rank 0": r"rank 0 does not answer: it is stopped",
    "exception of rank 0": r"rank 0 failed: ValueError: an error of this rank",
    "full_tensor of rank 0": r"rank 0 in model\.full_tensor\(\)",
}
SAID |= dict.fromkeys(
    ("batch shape", "dtype", "evaluation mode", "frozen", "evaluation"), r"ranks make different calls"
)
# A rank that rests has ten times the timeout.
PATIENT = ("sleep", "late")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("fault", "stages"),
    [(fault, False) for fault in (*EVERYWHERE, *ONCE, *FIRST)] + [(fault, True) for fault in EVERYWHERE],
)
def test_each_fault_ends_everywhere_and_is_named(fault: str, stages: bool) -> None:
    row = inject(fault, dict(STAGES if stages else WHOLE))
    assert row["left_behind"] == 0
    assert isinstance(row["seconds"], float)
    assert row["seconds"] < TIMEOUT * (10 if fault in PATIENT else 1) + SLACK
    expected = SAID.get(fault, r"ranks pass different autopar\.Options" if fault.startswith("options") else "")
    assert re.search(expected, str(row["said"])), row["said"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", LAUNCHER)
def test_nothing_is_left_behind_by_the_launcher(number: signal.Signals) -> None:
    row = inject("none", dict(WHOLE), number)
    assert row["left_behind"] == 0
    assert isinstance(row["seconds"], float) and row["seconds"] < SLACK


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root, ip and tc")
def test_a_host_that_is_cut_off_ends_on_both_sides() -> None:
    row = freeze_a_host()
    assert row["left_behind"] == 0
    assert isinstance(row["seconds"], float) and row["seconds"] < TIMEOUT + SLACK
    assert re.search(r"does not answer: it is stopped, or cut off", str(row["said"])), row["said"]
