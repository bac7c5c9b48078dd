"""Compares loss and gradients on local processes with one."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from autopar.cli.arguments import TARGET_HELP, add_mesh, add_planning, checked, load_target, options_from, positive
from autopar.cli.output import Output
from autopar.cli.plans import describe
from autopar.cli.status import FAILED, OK
from autopar.plans.plan import Plan
from autopar.verification.verify import verify as verify_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("target", help=TARGET_HELP)
    parser.add_argument(
        "--plan", metavar="PLAN", help="the plan to check, written by `autopar plan --output`: path or URL"
    )
    parser.add_argument(
        "--steps",
        type=checked(positive),
        default=1,
        help="train this many steps, and compare every loss, parameters, buffers and an evaluation too (1)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="end a hanging run (300)")
    add_mesh(parser, required=True)
    add_planning(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    options = options_from(arguments)
    plan = Plan.load(arguments.plan) if arguments.plan else None
    model, batch = load_target(arguments.target)
    with output.progress(f"verifying {describe(model)} on {arguments.mesh}"):
        report = verify_model(
            model,
            arguments.mesh,
            batch,
            options=options,
            cluster=arguments.cluster,
            plan=plan,
            steps=arguments.steps,
            timeout=arguments.timeout,
        )
    data = {
        "ok": report.ok,
        "loss_error": report.loss_error,
        "max_error": report.max_error,
        "gradient_errors": report.gradient_errors,
        "noise": {name: asdict(sizes) for name, sizes in report.noise.items()},
        "unmeasured": report.unmeasured,
        "steps": report.steps,
        "later_errors": report.later_errors,
        "seconds": report.seconds,
        "plan": report.plan,
    }
    output.result(report, data)
    return OK if report.ok else FAILED
