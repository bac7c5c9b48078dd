"""Whether this machine has what autopar needs."""

from __future__ import annotations

import argparse

from autopar.cli.examine import examine
from autopar.cli.output import Output
from autopar.cli.status import FAILED, OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments: none."""


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    report = examine()
    output.result(report, report.data())
    return OK if report.ok else FAILED
