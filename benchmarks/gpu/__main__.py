"""The kit for the first hour on a GPU, in twelve minutes: ``python -m benchmarks.gpu [--parts ...] [--output FILE]``.

The parts, each in processes of its own, so that none ends with another:

- ``calibrate``: the rates of the devices, beside their preset's (:mod:`benchmarks.gpu.calibrate`);
- ``messages``: each collective through NCCL (:mod:`benchmarks.gpu.messages`);
- ``programs``: programs of all ranks of multi-rank plans on one GPU, against eager (:mod:`benchmarks.gpu.programs`);
- ``features``: what the runtime does beside a plain step, against torch's own (:mod:`benchmarks.gpu.features`);
- ``experts``: blocks of experts in groups and one by one, of the sizes of published mixtures
  (:mod:`benchmarks.gpu.experts`);
- ``train``: models of 25 to 400 million parameters beside eager, torch.compile and FSDP2, and on several GPUs DDP,
  FSDP2 and TP (:mod:`benchmarks.gpu.train`);
- ``ops``: predicted against measured seconds by kind of operation (:mod:`benchmarks.gpu.operations`).

A case that fails is a row with its error; one for which there is no time is a row that says so. Figures are written
after each part. ``--device cpu --tiny`` runs the same code on processors with gloo, to test the kit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.report import describe_machine

from .setting import Setting
from .supervise import rows_of
from .tables import summary, table, with_ratios
from .worker import module_of

# The parts, and their shares of the time; what one leaves is for those after it.
# By what they took on an H200 with 16 cores.
SHARES = {
    "calibrate": 0.04, "messages": 0.02, "programs": 0.12, "features": 0.15, "experts": 0.03, "train": 0.58, "ops": 0.06
}  # fmt: skip
# Seconds for all parts: twelve minutes, less the start and the time by which workers may be late.
SECONDS = 690.0
# Parts that run on all devices; the others on one.
ON_ALL = ("calibrate", "messages", "train")
# Parts that measure no time: their cases are done several at once.
AT_ONCE = ("programs", "features")
# Columns of the tables, also where the output is a file. Chosen: the widest table.
_WIDTH = 130
# Processes that plan and run programs at once, on one device.
# Chosen: most of their time is planning, on one core each.
_WORKERS = 8


def workers_for(part: str, setting: Setting) -> int:
    """Processes that share the cases of a part."""
    at_once = part in AT_ONCE and setting.kind == "cuda"
    return max(1, min(_WORKERS, (os.cpu_count() or 1) // 2)) if at_once else 1


def run_parts(
    parts: Sequence[str], setting: Setting, seconds: float, path: str | None, only: Sequence[str] = ("",)
) -> dict[str, Any]:
    """The figures of ``parts``, written to ``path`` after each. ``only``: cases that contain one of these."""
    figures: dict[str, Any] = {"benchmark": "gpu", "machine": describe_machine(), "device": setting.kind}
    figures |= {"tiny": setting.tiny, "devices": setting.world, "parts": {}}
    budget, total = 0.0, sum(SHARES[part] for part in parts)
    for part in parts:
        here = setting if part in ON_ALL else replace(setting, world=1)
        begin, budget = time.time(), budget + seconds * SHARES[part] / total
        cases = [case for case in module_of(part).cases(here) if any(text in case for text in only)]
        rows = rows_of(part, cases, begin + budget, here, workers_for(part, here))
        rows = with_ratios(rows) if part == "train" else rows
        taken = time.time() - begin
        budget -= taken
        figures["parts"][part] = {"seconds": round(taken, 1), "rows": rows}
        figures["summary"] = summary(figures["parts"])
        if path is not None:
            Path(path).write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(SHARES), default=list(SHARES), help="(all)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases that contain one of these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    parser.add_argument("--devices", type=int, help="how many to train on; default all GPUs, or one process")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", metavar="FILE", help="a JSON file to write the figures to")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    chosen = parse(words)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        built = "" if torch.version.cuda else f", and torch {torch.__version__} is built without CUDA"
        sys.stderr.write(
            f"there is no GPU that torch can use{built}; --device cpu --tiny tests the kit itself on processors\n"
        )
        return 2
    world = chosen.devices or (torch.cuda.device_count() if chosen.device == "cuda" else 1)
    setting = Setting(chosen.device, chosen.tiny, world)
    figures = run_parts(chosen.parts, setting, chosen.seconds, chosen.output, chosen.only)
    if chosen.json:
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
        return 0
    console = Console(width=max(Console().width, _WIDTH))
    for part, found in figures["parts"].items():
        console.print(table(part, found["rows"]))
    console.print(figures["summary"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
