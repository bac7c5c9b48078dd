"""Plans a model; no processes and no devices needed."""

from __future__ import annotations

import argparse

from autopar.cli.arguments import CONFIG_HELP, TARGET_HELP, add_mesh, add_planning, checked, positive
from autopar.cli.layouts import OF_LAYOUTS, plan_by_layouts
from autopar.cli.output import Output
from autopar.cli.plans import TABLES, make_plan, view, write_files
from autopar.cli.status import OK
from autopar.errors import OptionsError

# What plans with --mesh have instead of the options of those with --devices.
_INSTEAD = {
    "batch": "plans the model's own batch",
    "sequence": "plans the model's own batch",
    "tokens": "prints one plan, not a table with the days that it takes",
    "compare": "prints one plan, not a table (--layout restricts it to a layout)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", help=f"{TARGET_HELP}; {CONFIG_HELP}")
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device: takes no memory")
    parser.add_argument(
        "--output",
        metavar="PLAN.json",
        help="path or URL to write the plan to, for explain, diff and parallelize(plan=); as lines of text if not "
        "called .json",
    )
    parser.add_argument(
        "--show",
        choices=("plan", "tree", *TABLES),
        default="plan",
        help="print the plan, the tree of modules, or what a step costs by module, kind, op, rule, phase, collective "
        "or stage",
    )
    parser.add_argument("--html", metavar="PLAN.html", help="write the plan as a page, to a path or URL")
    where = parser.add_mutually_exclusive_group(required=True)
    add_mesh(where, required=False)
    where.add_argument(
        "--devices",
        type=checked(positive),
        metavar="N",
        help="the mesh of so many devices instead, and a table of plans",
    )
    add_planning(parser)
    _add_layouts(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    if arguments.devices is not None:
        return plan_by_layouts(arguments, output)
    for name in OF_LAYOUTS:
        if getattr(arguments, name) not in (None, []):
            raise OptionsError(f"--{name} is for plans with --devices N; --mesh {_INSTEAD[name]}")
    plan = make_plan(arguments, output)
    write_files(plan, arguments)
    output.result(view(plan, arguments.show), plan)
    return OK


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    """Adds the options of plans for a number of devices (``--devices``)."""
    text = "with --devices instead of --mesh: a table of the plan, of others that the search priced, and of layouts"
    group = parser.add_argument_group("devices", text)
    group.add_argument(
        "--batch", type=checked(positive), metavar="SAMPLES", help="of a step; default: the model's batch"
    )
    group.add_argument("--sequence", type=checked(positive), metavar="TOKENS", help="of a sample, for a config.json")
    group.add_argument("--tokens", type=float, help="that training takes, for the days it needs: 300e9")
    group.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="price this layout too: 'tensor=8 pipeline=16 data=8 recompute=full'; repeats allowed",
    )
