"""The command line: ``autopar plan | show | explain | diff | verify | run | launch | calibrate | doctor | bench |
completion``.

Models are named ``file.py:function`` or ``module:function``: a function without arguments that returns
``(model, batch)``, where the batch is a tuple of positional inputs or a dict of keyword inputs, global.
Exit status: 0 success, 1 a check failed (gradients differ, a script failed, plans differ), 2 bad usage or
an error of autopar's own, reported in one message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from autopar.cli.commands import NAMES, Command, load
from autopar.cli.output import Output
from autopar.cli.status import OK, USAGE

from .errors import AutoparError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parsed = _parse(arguments)
    output = Output(json=parsed.json)
    command: Command = parsed.command
    try:
        status = command.run(parsed, output)
        sys.stdout.flush()
        return status
    except AutoparError as error:
        output.error(str(error), type(error).__name__)
        return USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) closed the pipe; nothing may be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed words. A command's optional ``name`` may also stand behind options: argparse before Python 3.12.7
    takes it only directly behind the first word."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(words[:1] if words and words[0] in NAMES else NAMES)
    parsed, left = parser.parse_known_args(arguments)
    if len(left) == 1 and not left[0].startswith("-") and getattr(parsed, "name", "") is None:
        parsed.name = left[0]
    elif left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    return parsed


def make_parser(names: Sequence[str] = NAMES) -> argparse.ArgumentParser:
    """The parser of the commands ``names``; each sets ``command`` to its module."""
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="Automatic parallelism for PyTorch models.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=18),
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(make_parser=make_parser)
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for name in names:
        _add(subparsers, load(name))
    return parser


def _add(subparsers: Any, command: Command) -> None:
    """Adds a subcommand with the name and the docstring of its module."""
    summary = (command.__doc__ or "").strip()
    name = command.__name__.rpartition(".")[2]
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.set_defaults(command=command)
    command.add_arguments(parser)


def _version() -> str:
    return f"autopar {version('autopar')} (torch {torch.__version__})"


if __name__ == "__main__":
    sys.exit(main())
