"""Plans as commands read, make, show and write them."""

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
    """A plan in either of its forms, whatever the file is called."""
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
    """A model by its class and size."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({count / 1e6:,.1f}M parameters)"


def write_files(made: Plan, arguments: argparse.Namespace) -> None:
    """What ``--output`` and ``--html`` ask for."""
    if arguments.output:
        path = Path(arguments.output)
        write(path, made.to_json() if path.suffix == ".json" else made.to_text())
    if arguments.html:
        made.to_html(arguments.html)


def view(made: Plan, what: str) -> object:
    """The plan as a whole, as a tree, or a table of it."""
    if what in TABLES:
        return made.table(by=what)
    return made.tree() if what == "tree" else made


def write(path: Path, text: str) -> None:
    """Raises :class:`OptionsError` if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionsError(f"cannot write {str(path)!r}: {error.strerror}") from error
