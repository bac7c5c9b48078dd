"""Reads, makes, shows and writes plans for commands."""

from __future__ import annotations

import argparse

from torch import nn

from autopar.files import check_folder, exists, is_url
from autopar.plans.plan import Plan

from .arguments import load_target, options_from
from .output import Output

TABLES = ("module", "kind", "op", "rule", "phase", "collective", "stage", "division")


def is_plan_file(target: str) -> bool:
    """Whether ``target`` is a path or URL, and not ``file.py:function``."""
    return ":" not in target or is_url(target) or exists(target)


def make_plan(arguments: argparse.Namespace, output: Output) -> Plan:
    """The plan that a command line asks for."""
    from autopar.api import plan as plan_model  # Here, since it loads what traces, and viewing a plan does without.

    options = options_from(arguments)
    check_files(arguments)
    model, batch = load_target(arguments.target, meta=arguments.meta)
    with output.progress(f"planning {describe(model)} on {arguments.mesh}"):
        return plan_model(model, arguments.mesh, batch, cluster=arguments.cluster, options=options)


def describe(model: nn.Module) -> str:
    """The class and size of a model, for messages."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({count / 1e6:,.1f}M parameters)"


def check_files(arguments: argparse.Namespace) -> None:
    """Raises :class:`OptionsError` before a plan is made that could not be written to ``--output`` or ``--html``."""
    for name in ("output", "html"):
        if path := getattr(arguments, name, None):
            check_folder(path)


def write_files(plan: Plan, arguments: argparse.Namespace) -> None:
    """Writes the files that ``--output`` and ``--html`` ask for."""
    if arguments.output:
        plan.save(arguments.output)
    if arguments.html:
        plan.to_html(arguments.html, getattr(arguments, "record", None))


def view(plan: Plan, form: str) -> object:
    """The whole plan, its tree, or a table of it."""
    if form in TABLES:
        return plan.table(by=form)
    return plan.tree() if form == "tree" else plan
