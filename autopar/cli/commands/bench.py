"""Runs the benchmarks of a checkout."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from typing import Any

from autopar.cli.output import Output
from autopar.cli.status import FAILED, OK
from autopar.errors import OptionsError

BENCHMARKS = ("planning", "step_time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", nargs="?", choices=(*BENCHMARKS, "all"), default="all")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the benchmark")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    sys.path.insert(0, os.getcwd())
    names = BENCHMARKS if arguments.name == "all" else (arguments.name,)
    if importlib.util.find_spec("benchmarks") is None:
        raise OptionsError("the benchmarks are not part of the installed package; run this in a checkout of autopar")
    statuses = [_run_benchmark(name, arguments.arguments, output) for name in names]
    return OK if not any(statuses) else FAILED


def _run_benchmark(name: str, arguments: list[str], output: Output) -> int:
    extra: list[Any] = ["--json"] if output.json else []
    return subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *extra, *arguments], check=False).returncode
