"""Tries torch's test data, each operation in a process of its own: ``python -m tests.op_db.sweep out.jsonl``."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .outcome import Outcome, outcome_of
from .samples import MODULES, OPS, inplace_subjects, module_subjects, op_subjects
from .wrapped import Subject

Make = Callable[[str, str, int], Iterator[Subject]]
MAKERS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "op": (op_subjects, tuple(OPS)),
    "inplace": (inplace_subjects, tuple(OPS)),
    "module": (module_subjects, tuple(MODULES)),
}
# What is tried: how, in which dtype, and how many samples.
TRIED = ("op:f64:1", "module:f32:1", "op:c128:1", "inplace:f64:1", "module:f64:2", "op:f32:1", "op:f64:3")


def run(tried: str, name: str, out: Path, done: set[str]) -> None:
    """One operation in a forked process, which may crash."""
    kind, dtype, count = tried.split(":")
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            for subject in MAKERS[kind][0](name, dtype, int(count)):
                if subject.name not in done:
                    _write(out, outcome_of(subject))
        except Exception as error:
            _write(out, Outcome(f"{name} {tried}", "crash", "samples", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        _write(out, Outcome(f"{name} {tried}", "crash", "process", f"ended with status {status}"))


def _write(out: Path, outcome: Outcome) -> None:
    with out.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def _known(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main(out: str, tried: Sequence[str] = TRIED, part: tuple[int, int] = (0, 1), only: Sequence[str] = ()) -> None:
    """Tries what is not in ``out`` yet: of every kind part ``part[0]`` of ``part[1]``, or the names in ``only``."""
    path = Path(out)
    for what in tried:
        done = {line["name"] for line in _known(path)}
        names = MAKERS[what.split(":")[0]][1]
        for name in [n for n in only if n in names] if only else names[part[0] :: part[1]]:
            run(what, name, path, done)
    print(Counter(line["kind"] for line in _known(path)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="a file of JSON lines, which is continued")
    parser.add_argument("--tried", nargs="*", default=TRIED, help="kind:dtype:samples")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), help="which of how many parts")
    parser.add_argument("--only", nargs="*", default=(), help="names of operations or modules")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = _arguments()
    main(given.out, given.tried, tuple(given.part), given.only)
