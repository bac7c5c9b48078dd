"""Why a tensor is placed so; what ranks do when; graphs by pass."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from autopar.cli.arguments import TARGET_HELP, add_mesh, add_planning, load_target
from autopar.cli.output import Output
from autopar.cli.plans import describe, is_plan_file, make_plan
from autopar.cli.status import OK
from autopar.errors import OptionsError
from autopar.plans.plan import Plan
from autopar.plans.views.step_timeline import step_timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", help=f"a plan written by `autopar plan --output` (path or URL), or {TARGET_HELP}")
    parser.add_argument("name", nargs="?", help="a parameter or module, such as model.layers.0.mlp.up_proj, or %%node")
    parser.add_argument(
        "--solve", action="store_true", help="also solve again with the choice forbidden: what it is worth"
    )
    parser.add_argument(
        "--after",
        metavar="PASS",
        help="print the graph after a pass instead; `--after names` lists them",
    )
    parser.add_argument(
        "--timeline", metavar="STEP.json", help="write when each rank does what, for chrome://tracing or Perfetto"
    )
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device: takes no memory")
    add_mesh(parser, required=False)
    add_planning(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    is_file = is_plan_file(arguments.target)
    if is_file and (arguments.after or arguments.solve):
        what = "--after" if arguments.after else "--solve"
        raise OptionsError(f"{what} needs the model, which a plan file does not have: name model.py:make, with --mesh")
    if is_file:
        plan = Plan.load(arguments.target)
    elif arguments.mesh is None:
        raise OptionsError("to plan the model first, give --mesh (or name a plan written by `autopar plan --output`)")
    else:
        plan = make_plan(arguments, output)
    if arguments.after:
        return _print_after(arguments, plan, output)
    if arguments.timeline:
        step_timeline(plan).save_chrome_trace(arguments.timeline)
    if arguments.name is None:
        if not arguments.timeline:
            raise OptionsError("name a parameter or module to explain, a file for --timeline, or a pass for --after")
        output.result(f"timeline written to {arguments.timeline}", {"timeline": arguments.timeline})
        return OK
    solving = output.progress(f"solving again without this choice of {arguments.name}")
    with solving if arguments.solve else nullcontext():
        reason = plan.why(arguments.name, solve=arguments.solve)
    output.result(reason, {"name": arguments.name, "why": reason, "text": str(reason)})
    return OK


def _print_after(arguments: argparse.Namespace, plan: Plan, output: Output) -> int:
    """Prints the graph after a pass."""
    from autopar.pass_graphs import after_pass  # Here, since it loads all passes.

    model, batch = load_target(arguments.target, meta=arguments.meta)
    with output.progress(f"the graph of {describe(model)} after {arguments.after}"):
        text = after_pass(model, batch, arguments.after, plan=plan, cluster=arguments.cluster)
    output.result(text, {"pass": arguments.after, "text": text})
    return OK
