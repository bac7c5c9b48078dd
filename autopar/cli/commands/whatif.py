"""Plans for other memory, devices, batches, precision or hardware."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from autopar.byte_sizes import parse_bytes
from autopar.cli.arguments import TARGET_HELP, add_mesh, add_planning, checked, parse_mesh, positive
from autopar.cli.output import Output
from autopar.cli.plans import is_plan_file, make_plan
from autopar.cli.status import FAILED, OK
from autopar.errors import OptionsError
from autopar.options import CHOICES
from autopar.plans.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", help=TARGET_HELP)
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device: takes no memory")
    parser.add_argument(
        "--html", metavar="PLAN.html", help="write the plan as a page with the frontier, to a path or URL"
    )
    add_mesh(parser, required=False)
    text = "one is changed at a time; without any, memory and devices around those of the plan"
    group = parser.add_argument_group("what is changed", text)

    def add(name: str, parse: Callable[[str], Any], metavar: str, help: str) -> None:
        group.add_argument(name, type=checked(lambda text: _listed(text, parse)), metavar=metavar, help=help)

    add("--memory-limits", _bytes, "BYTES,...", "bytes per device: 80GB,40GB,20GiB")
    add("--devices", _devices, "N,...", "numbers of devices, or shapes: 8,16,2x16")
    add("--batches", positive, "SAMPLES,...", "global batch sizes: 64,128")
    add("--precisions", _precision, "NAME,...", "fp32,bf16,fp16")
    add("--clusters", str, "NAME,...", "presets, paths or URLs: dgx-a100-80gb,dgx-h100")
    add_planning(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status: 1 if no circumstance has a plan."""
    if is_plan_file(arguments.target):
        plan = Plan.load(arguments.target)
        mesh = ",".join(map(str, plan.mesh if plan.stages == 1 else plan.stage_meshes.whole))
        raise OptionsError(
            f"{arguments.target} is a plan, and to solve again takes its model, which no plan file has: name "
            f"the function that returns (model, batch), as in autopar whatif train.py:make --mesh {mesh} (the plan's "
            "mesh), with the options of the plan"
        )
    if arguments.mesh is None:
        raise OptionsError("give the mesh of the plan that is asked: --mesh 2,2")
    plan = make_plan(arguments, output)
    with output.progress("solving again under other circumstances"):
        found = plan.whatif(
            memory_limit=arguments.memory_limits,
            devices=arguments.devices,
            batch=arguments.batches,
            precision=arguments.precisions,
            cluster=arguments.clusters,
        )
    if arguments.html:
        plan.to_html(arguments.html, whatif=found)
    output.result(found, found.data())
    return OK if any(answer.plan is not None for answer in found.answers) else FAILED


def _listed(text: str, parse: Callable[[str], Any]) -> list[Any]:
    return [parse(part.strip()) for part in re.split(r",(?![^(]*\))", text)]


def _bytes(text: str) -> str:
    parse_bytes(text)  # Checks it; kept as it was written, which the table shows.
    return text


def _devices(text: str) -> int | tuple[int, ...]:
    return parse_mesh(text) if "x" in text else positive(text)


def _precision(text: str) -> str:
    if text not in CHOICES["precision"]:
        names = ", ".join(map(str, CHOICES["precision"]))
        raise argparse.ArgumentTypeError(f"{text!r} is not a precision: one of {names}")
    return text
