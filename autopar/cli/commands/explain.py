"""Why a tensor is placed so; when each rank does what."""

from __future__ import annotations

import argparse

from autopar.cli.arguments import TARGET_HELP, add_mesh, add_planning
from autopar.cli.output import Output
from autopar.cli.plans import make_plan
from autopar.cli.status import OK
from autopar.errors import OptionsError
from autopar.files import exists, is_url
from autopar.plans.plan import Plan
from autopar.plans.views.step_timeline import step_timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", help=f"a plan written by `autopar plan --output` (path or URL), or {TARGET_HELP}")
    parser.add_argument("name", nargs="?", help="parameter or module path, such as model.layers.0.mlp.up_proj.weight")
    parser.add_argument(
        "--timeline", metavar="STEP.json", help="write when each rank does what, for chrome://tracing or Perfetto"
    )
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device: takes no memory")
    add_mesh(parser, required=False)
    add_planning(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    if ":" not in arguments.target or is_url(arguments.target) or exists(arguments.target):
        plan = Plan.load(arguments.target)
    elif arguments.mesh is None:
        raise OptionsError("to plan the model first, give --mesh (or name a plan written by `autopar plan --output`)")
    else:
        plan = make_plan(arguments, output)
    if arguments.timeline:
        step_timeline(plan).save_chrome_trace(arguments.timeline)
    if arguments.name is None:
        if not arguments.timeline:
            raise OptionsError("name a parameter or module to explain, or a file for --timeline")
        output.result(f"timeline written to {arguments.timeline}", {"timeline": arguments.timeline})
        return OK
    reason = plan.why(arguments.name)
    output.result(reason, {"name": arguments.name, "why": reason, "text": str(reason)})
    return OK
