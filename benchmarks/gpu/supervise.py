"""Has the cases of a part done by worker processes, and stands what becomes of these."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from .setting import Row, Setting
from .worker import STOPPED, Work

# Seconds after its deadline when a worker is ended: it may be inside a kernel or a collective.
_GRACE = 10.0
# Characters of a dead worker's output in its row.
_TAIL = 2000


def rows_of(part: str, cases: Sequence[str], deadline: float, setting: Setting, workers: int = 1) -> list[Row]:
    """The rows of ``cases``, in their order, done by as many ``workers`` at once, until ``deadline`` (epoch)."""
    shares = [tuple(cases[index::workers]) for index in range(workers)]
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder, ThreadPoolExecutor(workers) as pool:
        made = (
            Work(part, share, deadline, str(Path(folder) / f"{index}.rows"), setting)
            for index, share in enumerate(shares)
            if share
        )
        rows = [row for found in pool.map(_all_cases, made) for row in found]
    return sorted(rows, key=lambda row: next((i for i, case in enumerate(cases) if row["case"].startswith(case)), 0))


def _all_cases(work: Work) -> list[Row]:
    """The rows of one worker's cases; it is started again where it ended early."""
    rows: list[Row] = []
    while work.cases:
        if rows and time.time() > work.deadline:  # Another process would take seconds to say the same.
            return [*rows, *({"case": case, "left": "no time left"} for case in work.cases)]
        Path(work.path).write_text("")
        said = _run(work)
        found, begun, done = _read(Path(work.path))
        rows += found
        if said is None:
            return rows
        lost = begun if begun is not None else work.cases[0] if not done else None
        if lost is not None:
            rows.append({"case": lost, "error": said})
            done = [*done, lost]
        work = replace(work, cases=tuple(case for case in work.cases if case not in done))
    return rows


def _read(path: Path) -> tuple[list[Row], str | None, list[str]]:
    """Rows, the case that has begun and not ended, and those that are done."""
    rows, begun, done = [], None, []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "begin" in line:
            begun = line["begin"]
        elif "end" in line:
            begun = None
            done.append(line["end"])
        else:
            rows.append(line["row"])
            done += [line["row"]["case"]] if "left" in line["row"] else []
    return rows, begun, done


def _run(work: Work) -> str | None:
    """Runs one worker, or one for each device, to its end: None if it did its work, else what became of it."""
    description, log = Path(f"{work.path}.json"), Path(f"{work.path}.log")
    description.write_text(work.to_json())
    command = [sys.executable]
    if work.setting.world > 1 and work.part != "calibrate":  # Which starts processes of its own.
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work.setting.world}"]
    command += ["-m", "benchmarks.gpu.worker", str(description)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONFAULTHANDLER": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(max(1.0, work.deadline - time.time()) + _GRACE)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # A launcher ends its ranks, which are in sessions of their own.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE / 2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return None
    outcome = f"ended at the time limit, {_GRACE:.0f} s late" if code is None else f"ended (exit code {code})"
    return outcome if code == STOPPED else f"{outcome}: {log.read_text()[-_TAIL:]}"
