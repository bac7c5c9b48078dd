"""Checks this machine; by torchrun, all hosts of a job."""

from __future__ import annotations

import argparse
import os

from autopar.calibration.job import in_job
from autopar.cli.examine import examine
from autopar.cli.examine_job import in_gloo_job
from autopar.cli.output import Output
from autopar.cli.status import FAILED, OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments: none."""


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status. Of a job, the first rank prints."""
    report = in_gloo_job() if in_job() else examine()
    if os.environ.get("RANK", "0") == "0" or not in_job():
        output.result(report, report.data())
    return OK if report.ok else FAILED
