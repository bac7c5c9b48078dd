"""The command line: ``autopar plan | show | explain | diff | run | verify | doctor | calibrate | bench``.

Models are named ``file.py:function`` or ``module:function``: a function without arguments that returns
``(model, batch)``, where the batch is a tuple of positional inputs or a dict of keyword inputs, global.
Exit status: 0 well, 1 a check failed (gradients differ, a script failed, plans differ), 2 bad usage or
anything autopar raises on purpose, said in one message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import AutoparError, OptionsError
from autopar.layout import CHOICES as LAYOUT_CHOICES
from autopar.optimizers import OPTIMIZERS
from autopar.options import CHOICES

from . import commands
from .arguments import parse_bytes, parse_mesh
from .output import Output

TARGET_HELP = "file.py:function or module:function, which returns (model, batch)"
CONFIG_HELP = "or, with --devices, the config.json of a transformers model"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parsed = make_parser().parse_args(arguments)
    output = Output(json=parsed.json)
    command: commands.Command = parsed.command
    try:
        status = command(parsed, output)
        sys.stdout.flush()
        return status
    except AutoparError as error:
        output.error(str(error), type(error).__name__)
        return commands.USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has what it wanted; nothing may be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return commands.OK


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``command`` to the function that runs it."""
    parser = argparse.ArgumentParser(prog="autopar", description="Automatic parallelism for PyTorch models.")
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(metavar="command", required=True)
    _add_plan(subparsers)
    _add_show(subparsers)
    _add_explain(subparsers)
    _add_diff(subparsers)
    _add_verify(subparsers)
    _add_run(subparsers)
    _add_calibrate(subparsers)
    _add_doctor(subparsers)
    _add_bench(subparsers)
    return parser


def _version() -> str:
    from importlib.metadata import version

    return f"autopar {version('autopar')} (torch {torch.__version__})"


def _add(subparsers: Any, command: commands.Command) -> argparse.ArgumentParser:
    """A subcommand named, and described, as the function that runs it."""
    summary = (command.__doc__ or "").strip()
    parser: argparse.ArgumentParser = subparsers.add_parser(command.__name__, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.set_defaults(command=command)
    return parser


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` with its errors said the way argparse says them, usage and all."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except OptionsError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise OptionsError(f"{text!r} is not a positive whole number")
    return int(text)


def _processes_here() -> int:
    return torch.cuda.device_count() or os.cpu_count() or 1


def _add_mesh(parser: Any, required: bool) -> None:
    text = "shape of the device mesh, outermost (slowest link) first: 2,2"
    parser.add_argument("--mesh", type=_checked(parse_mesh), required=required, help=text)


def _add_planning(parser: argparse.ArgumentParser, *more: Mapping[str, tuple[object, ...]]) -> None:
    """The options of everything that plans; what is left out is searched, or as :class:`Options` has it. ``more``:
    choices besides those of :class:`Options`."""

    def add_choice(name: str, text: str) -> None:
        known = tuple(dict.fromkeys(value for choices in (CHOICES, *more) for value in choices[name]))
        group.add_argument(f"--{name}", type=type(known[0]), choices=known, help=text)

    group = parser.add_argument_group("planning")
    group.add_argument("--cluster", help="hardware to price for: a preset such as dgx-a100-80gb, or local")
    group.add_argument("--memory-limit", type=_checked(parse_bytes), help="bytes per device: 10GiB")
    group.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=PLACEMENTS",
        help="fix the placements of a weight or module: 'lm_head.weight=S(0),R'; globs and repeats allowed",
    )
    add_choice("precision", "what products are computed in" + ("; fp8 of layouts only (--devices)" if more else ""))
    add_choice("zero", "fix the ZeRO stage instead of searching")
    recompute = "compute saved values again instead of keeping them; by default whatever makes the step fit"
    recompute += "; elementwise and operations of layouts only" if more else ""
    offload = "keep optimizer state in host memory; by default where that makes the step fit"
    group.add_argument("--offload", action=argparse.BooleanOptionalAction, default=None, help=offload)
    add_choice("recompute", recompute)
    group.add_argument("--microbatches", type=_checked(_positive))
    group.add_argument("--stages", type=_checked(_positive))
    group.add_argument("--schedule")
    group.add_argument("--optimizer", choices=sorted(OPTIMIZERS), help="decides the bytes of optimizer state")
    group.add_argument("--time-limit", type=float, metavar="SECONDS", help="of computing, for the solvers")
    group.add_argument("--gap", type=float, help="relative distance from the proven bound that is good enough")
    group.add_argument("--seed", type=int)
    group.add_argument("--no-mesh-search", dest="mesh_search", action="store_false", help="keep the axes as given")


def _add_plan(subparsers: Any) -> None:
    parser = _add(subparsers, commands.plan)
    parser.add_argument("target", help=f"{TARGET_HELP}; {CONFIG_HELP}")
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device: takes no memory")
    parser.add_argument(
        "--output",
        metavar="PLAN.json",
        help="write the plan, for explain, diff and parallelize(plan=); as lines of text if not called .json",
    )
    parser.add_argument(
        "--show",
        choices=("plan", "tree", *commands.TABLES),
        default="plan",
        help="print the plan, the tree of modules, or what a step costs by module, kind, op, rule, phase, collective "
        "or stage",
    )
    parser.add_argument("--html", metavar="PLAN.html", help="write the plan as a page")
    where = parser.add_mutually_exclusive_group(required=True)
    _add_mesh(where, required=False)
    where.add_argument("--devices", type=_checked(_positive), metavar="N", help="search layouts of so many instead")
    _add_planning(parser, LAYOUT_CHOICES)
    _add_layouts(parser)


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    """The options of planning by layouts, which ``--devices`` asks for."""
    text = "with --devices instead of --mesh: the best of all layouts of a large model, equal layers traced once"
    group = parser.add_argument_group("layouts", text)
    group.add_argument(
        "--batch", type=_checked(_positive), metavar="SAMPLES", help="of a step; default: the model's batch"
    )
    group.add_argument("--sequence", type=_checked(_positive), metavar="TOKENS", help="of a sample, for a config.json")
    group.add_argument("--tokens", type=float, help="that training takes, for the days it needs: 300e9")
    group.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="price this layout too: 'tensor=8 pipeline=16 data=8 recompute=full'; repeats allowed",
    )


def _add_show(subparsers: Any) -> None:
    parser = _add(subparsers, commands.show)
    parser.add_argument("plan", metavar="PLAN", help="a plan written by `autopar plan --output`")
    parser.add_argument(
        "--by",
        choices=("plan", "tree", *commands.TABLES),
        default="plan",
        help="print the plan (as without --by), the tree of modules, or what a step costs by module, kind, op, rule, "
        "phase, collective or stage",
    )
    parser.add_argument("--html", metavar="PLAN.html", help="write the plan as a page")
    parser.add_argument("--output", metavar="FILE", help="write the plan again: as JSON if called .json, else as text")


def _add_explain(subparsers: Any) -> None:
    parser = _add(subparsers, commands.explain)
    parser.add_argument("target", help=f"a plan written by `autopar plan --output`, or {TARGET_HELP}")
    parser.add_argument("name", nargs="?", help="parameter or module path, such as model.layers.0.mlp.up_proj.weight")
    parser.add_argument(
        "--timeline", metavar="STEP.json", help="write when each rank does what, for chrome://tracing or Perfetto"
    )
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device: takes no memory")
    _add_mesh(parser, required=False)
    _add_planning(parser)


def _add_diff(subparsers: Any) -> None:
    parser = _add(subparsers, commands.diff)
    parser.add_argument("first", metavar="FIRST", help="a plan written by `autopar plan --output`")
    parser.add_argument("second", metavar="SECOND", help="another")


def _add_verify(subparsers: Any) -> None:
    parser = _add(subparsers, commands.verify)
    parser.add_argument("target", help=TARGET_HELP)
    parser.add_argument("--plan", metavar="PLAN", help="the plan to check, written by `autopar plan --output`")
    parser.add_argument(
        "--steps",
        type=_checked(_positive),
        default=1,
        help="train this many steps, and compare every loss, parameters, buffers and an evaluation too (1)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="end a hanging run (300)")
    _add_mesh(parser, required=True)
    _add_planning(parser)


def _add_run(subparsers: Any) -> None:
    parser = _add(subparsers, commands.run)
    parser.add_argument("--nproc", type=_checked(_positive), default=_processes_here(), help="processes on this host")
    parser.add_argument("--nnodes", default="1", help="number of hosts, or MIN:MAX")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where several hosts meet")
    parser.add_argument("--rendezvous-id", default="autopar", help="the same on every host of one run")
    parser.add_argument("--max-restarts", type=int, default=0, help="of the whole group after a failure (0)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("script", help="a training script that calls autopar.parallelize")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")


def _add_calibrate(subparsers: Any) -> None:
    parser = _add(subparsers, commands.calibrate)
    parser.add_argument("--nproc", type=_checked(_positive), default=4, help="processes to measure with (4)")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long to measure, about (40)")
    parser.add_argument("--output", metavar="FILE", help="where the description goes; default the cache of this user")
    parser.add_argument("--if-missing", action="store_true", help="do nothing where it was measured before")


def _add_doctor(subparsers: Any) -> None:
    _add(subparsers, commands.doctor)


def _add_bench(subparsers: Any) -> None:
    parser = _add(subparsers, commands.bench)
    parser.add_argument("name", nargs="?", choices=(*commands.BENCHMARKS, "all"), default="all")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the benchmark")


if __name__ == "__main__":
    sys.exit(main())
