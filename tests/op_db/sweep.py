"""Tries torch's test data, each operation in a process of its own: ``python -m tests.op_db.sweep out.jsonl [names]``."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from .outcome import Outcome, outcome_of
from .samples import MODULES, OPS, inplace_subjects, module_subjects, op_subjects
from .wrapped import Subject

Make = Callable[[str, str, int], Iterator[Subject]]
# What is tried: how, of which dtypes, and how many samples.
TRIED: dict[str, tuple[Make, dict[str, int]]] = {
    "op": (op_subjects, {"f64": 2, "c128": 1}),
    "inplace": (inplace_subjects, {"f64": 1}),
    "module": (module_subjects, {"f64": 2, "f32": 1}),
}


def subjects(kind: str, name: str) -> Iterator[Subject]:
    make, counts = TRIED[kind]
    for dtype, count in counts.items():
        yield from make(name, dtype, count)


def run(kind: str, name: str, out: Path) -> None:
    """One operation in a forked process, which may crash."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            for subject in subjects(kind, name):
                with out.open("a") as file:
                    file.write(json.dumps({"began": subject.name}) + "\n")
                _write(out, outcome_of(subject))
        except Exception as error:
            _write(out, Outcome(f"{name} {kind}", "crash", "samples", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        _write(out, Outcome(f"{name} {kind}", "crash", "process", f"ended with status {status}"))


def _write(out: Path, outcome: Outcome) -> None:
    with out.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def main(out: str, *only: str) -> None:
    path = Path(out)
    jobs = [("op", name) for name in OPS] + [("module", name) for name in MODULES] + [("inplace", name) for name in OPS]
    for kind, name in jobs:
        if not only or name in only or kind in only:
            run(kind, name, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    print(Counter(line["kind"] for line in lines if "kind" in line))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
