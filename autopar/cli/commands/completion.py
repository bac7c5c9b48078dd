"""Prints the completions of a shell."""

from __future__ import annotations

import argparse
import importlib.util

from autopar.cli.output import Output
from autopar.cli.status import OK
from autopar.errors import OptionsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "tcsh"),
        help="for bash: autopar completion bash > ~/.local/share/bash-completion/completions/autopar",
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    if importlib.util.find_spec("shtab") is None:
        raise OptionsError('completions are written by shtab: pip install "autopar[completion]"')
    import shtab

    text = str(shtab.complete(arguments.make_parser(), shell=arguments.shell))
    output.result(text, {"shell": arguments.shell, "file": text})
    return OK
