"""Prints a saved plan or a table of it, or writes its page."""

from __future__ import annotations

import argparse

from autopar.cli.output import Output
from autopar.cli.plans import TABLES, view, write_files
from autopar.cli.status import OK
from autopar.errors import OptionsError
from autopar.plans.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("plan", metavar="PLAN", help="a plan written by `autopar plan --output`: path or URL")
    parser.add_argument(
        "--by",
        choices=("plan", "tree", *TABLES),
        default="plan",
        help="print the plan (as without --by), the tree of modules, what a step costs by module, kind, op, rule, "
        "phase, collective or stage, or the divisions of the devices that were searched",
    )
    parser.add_argument("--html", metavar="PLAN.html", help="write the plan as a page, to a path or URL")
    parser.add_argument(
        "--record", metavar="STEPS.jsonl", help="with --html: what a run of the plan measured (autopar.monitor)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the plan again: as JSON if called .json, else as text")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    if arguments.record and not arguments.html:
        raise OptionsError("--record is drawn on the plan's page: give --html PLAN.html with it")
    plan = Plan.load(arguments.plan)
    write_files(plan, arguments)
    output.result(view(plan, arguments.by), plan)
    return OK
