"""What differs between two plans; 1 if anything does, as diff(1)."""

from __future__ import annotations

import argparse

from autopar.cli.output import Output
from autopar.cli.status import FAILED, OK
from autopar.plans.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("first", metavar="FIRST", help="a plan written by `autopar plan --output`: path or URL")
    parser.add_argument("second", metavar="SECOND", help="another")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    first, second = Plan.load(arguments.first), Plan.load(arguments.second)
    difference = first.diff(second)
    output.result(difference, {"same": difference.same, "diff": difference, "text": str(difference)})
    return OK if difference.same else FAILED
