"""Reads, makes, shows and writes plans for commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn

from autopar.api import plan as plan_model
from autopar.errors import OptionsError
from autopar.plans.plan import Plan

from .arguments import load_target, options_from
from .output import Output

TABLES = ("module", "kind", "op", "rule", "phase", "collective", "stage")


def read_plan(path: str) -> Plan:
    """Reads a plan in either of its forms, whatever the file's name. Raises :class:`OptionsError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Plan.from_text(text) if text.startswith("autopar plan") else Plan.from_json(text)
    except OSError as error:
        raise OptionsError(f"cannot read the plan {path!r}: {error.strerror}") from error
    except (OptionsError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path!r}: {error}; `autopar plan --output` writes one") from error


def make_plan(arguments: argparse.Namespace, output: Output) -> Plan:
    """The plan that a command line asks for."""
    options = options_from(arguments)
    model, batch = load_target(arguments.target, meta=arguments.meta)
    with output.progress(f"planning {describe(model)} on {arguments.mesh}"):
        return plan_model(model, arguments.mesh, batch, cluster=arguments.cluster, options=options)


def describe(model: nn.Module) -> str:
    """The class and size of a model, for messages."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({count / 1e6:,.1f}M parameters)"


def write_files(plan: Plan, arguments: argparse.Namespace) -> None:
    """Writes the files that ``--output`` and ``--html`` ask for."""
    if arguments.output:
        path = Path(arguments.output)
        write(path, plan.to_json() if path.suffix == ".json" else plan.to_text())
    if arguments.html:
        plan.to_html(arguments.html, getattr(arguments, "record", None))


def view(plan: Plan, form: str) -> object:
    """The whole plan, its tree, or a table of it."""
    if form in TABLES:
        return plan.table(by=form)
    return plan.tree() if form == "tree" else plan


def write(path: Path, text: str) -> None:
    """Writes ``text`` to ``path``. Raises :class:`OptionsError` if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionsError(f"cannot write {str(path)!r}: {error.strerror}") from error
