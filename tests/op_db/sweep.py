"""Tries torch's test data, each operation in a process of its own: ``python -m tests.op_db.sweep out.jsonl``.

What was tried is in ``out.jsonl``, and is not tried again: a sweep may be stopped and continued. What was tried least
often comes first.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .outcome import SECONDS, Outcome, outcome_of
from .samples import MODULES, NOT_OURS, OPS, empty_subjects, inplace_subjects, module_subjects, op_subjects
from .wrapped import Subject

Make = Callable[[str, str, int], Iterator[Subject]]
# How many samples of a name, a dtype and a kind: "op:f64:1", with the name behind.
Job = tuple[str, str]
OURS = tuple(name for name in OPS if name not in NOT_OURS)
MAKERS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "op": (op_subjects, OURS),
    "empty": (empty_subjects, OURS),
    "inplace": (inplace_subjects, OURS),
    "module": (module_subjects, tuple(MODULES)),
}
# What is tried: how, in which dtype, and how many samples.
TRIED = (
    *("op:f64:1", "module:f32:1", "op:c128:1", "inplace:f64:1", "module:c128:2", "op:f32:1", "empty:f64:1"),
    *("module:f64:2", "op:bf16:1", "op:f16:1", "op:f64:3"),
)
FINISHED = "finished"


def run(job: Job, out: Path, done: set[str], seconds: int = SECONDS) -> None:
    """One operation in a forked process, which may crash."""
    tried, name = job
    kind, dtype, count = tried.split(":")
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            for subject in MAKERS[kind][0](name, dtype, int(count)):
                if subject.name not in done:
                    _write(out, outcome_of(subject, seconds=seconds))
        except Exception as error:
            _write(out, Outcome(_job_name(job), "crash", "samples", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        _write(out, Outcome(_job_name(job), "crash", "process", f"ended with status {status}"))
    _write(out, Outcome(_job_name(job), FINISHED))


def _job_name(job: Job) -> str:
    tried, name = job
    return f"{name} {tried}"


def _write(out: Path, outcome: Outcome) -> None:
    with out.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def _known(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _in_order(jobs: Sequence[Job], known: Sequence[dict[str, str]]) -> list[Job]:
    """The jobs not finished yet, those first whose name was tried in their dtype least often."""
    finished = {line["name"] for line in known if line["kind"] == FINISHED}
    times = Counter(line["name"].partition("#")[0] for line in known)

    def tried(job: Job) -> int:
        kind, dtype, _ = job[0].split(":")
        return times[f"{job[1]}{'_' if kind == 'inplace' else ''}[{dtype}]"]

    return sorted((job for job in jobs if _job_name(job) not in finished), key=tried)


def main(
    out: str,
    tried: Sequence[str] = TRIED,
    part: tuple[int, int] = (0, 1),
    only: Sequence[str] = (),
    seconds: int = SECONDS,
) -> None:
    """Tries what is not in ``out`` yet: of every kind part ``part[0]`` of ``part[1]``, or the names in ``only``."""
    path = Path(out)
    jobs = [
        (what, name)
        for what in tried
        for names in [MAKERS[what.split(":")[0]][1]]
        for name in ([n for n in only if n in names] if only else names[part[0] :: part[1]])
    ]
    known = _known(path)
    done = {line["name"] for line in known}
    for job in _in_order(jobs, known):
        run(job, path, done, seconds)
    print(Counter(line["kind"] for line in _known(path) if line["kind"] != FINISHED))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="a file of JSON lines, which is continued")
    parser.add_argument("--tried", nargs="*", default=TRIED, help="kind:dtype:samples")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), help="which of how many parts")
    parser.add_argument("--only", nargs="*", default=(), help="names of operations or modules")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="the time limit of a sample")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = _arguments()
    main(given.out, given.tried, tuple(given.part), given.only, given.seconds)
