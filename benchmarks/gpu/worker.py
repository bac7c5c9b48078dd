"""A process that works through cases of a part: ``python -m benchmarks.gpu.worker WORK.json`` (:class:`Work`).

Each case is by itself: what it raises becomes a row. After an error that the device keeps (a failed assertion in a
kernel), or on several ranks, whose others may wait for this one, the process ends, and the kit starts another one for
the cases that are left. Rows are lines of JSON in a file, so that none is lost with the process.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks.time_limit import OutOfTime, time_limit

from .programs import poisoned
from .setting import Row, Setting, leave

# Parts that need torch.distributed, also for one process.
JOINED = ("messages", "features", "train", "ops")
# The exit status of a process that cannot go on to the next case.
STOPPED = 3


@dataclass(frozen=True)
class Work:
    """``cases`` of ``part`` to do until ``deadline`` (seconds since the epoch); ``path``: where rows go."""

    part: str
    cases: tuple[str, ...]
    deadline: float
    path: str
    setting: Setting

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Work:
        fields = json.loads(text)
        return Work(**{**fields, "cases": tuple(fields["cases"]), "setting": Setting(**fields["setting"])})


def module_of(part: str) -> Any:
    """The module of a part: its ``cases(setting)`` and ``run(case, setting)``."""
    return importlib.import_module({"ops": "benchmarks.gpu.operations"}.get(part, f"benchmarks.gpu.{part}"))


def work_through(work: Work) -> int:
    """Does the work; the exit status."""
    work.setting.prepare()
    if work.part in JOINED:
        work.setting.join()
    try:
        for case in work.cases:
            if not _goes_on(work):
                _note(work, {"row": {"case": case, "left": "no time left"}})
                continue
            _note(work, {"begin": case})
            if not _done(case, work):
                return STOPPED
    finally:
        leave()
    return 0


def _done(case: str, work: Work) -> bool:
    """Runs a case and notes its rows; whether the process can go on."""
    start, fine = time.perf_counter(), True
    try:
        with time_limit(work.deadline - time.time()):
            rows: list[Row] = module_of(work.part).run(case, work.setting)
    except (Exception, OutOfTime) as error:
        said = f"{type(error).__name__}: {str(error)[:800]}"
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        left = isinstance(error, OutOfTime)
        rows = [{"case": case, "left": said} if left else {"case": case, "error": said, "where": where}]
        fine = work.setting.world == 1 and not poisoned(error)
    for row in rows:
        _note(work, {"row": row})
    _note(work, {"end": case, "seconds": time.perf_counter() - start})
    gc.collect()
    if fine and work.setting.kind == "cuda":
        torch.cuda.empty_cache()
    return fine


def _goes_on(work: Work) -> bool:
    """Whether there is time for another case, the same on all ranks."""
    time_left = torch.tensor(int(time.time() < work.deadline))
    if dist.is_initialized():
        dist.all_reduce(time_left, dist.ReduceOp.MIN)
    return bool(time_left)


def _note(work: Work, line: Row) -> None:
    """Adds a line to the file; the first rank does."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(work.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    return work_through(Work.from_json(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    sys.exit(main())
