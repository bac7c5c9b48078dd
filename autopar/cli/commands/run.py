"""Starts a training script on several processes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from autopar.arguments import PLAN_VARIABLE
from autopar.cli.arguments import checked, not_negative, positive
from autopar.cli.late_ranks import late_ranks_named
from autopar.cli.output import Output
from autopar.cli.rendezvous import check_endpoint
from autopar.cli.status import OK
from autopar.errors import OptionsError
from autopar.plans.plan import Plan
from autopar.processes import die_with_parent
from autopar.torch_internals.elastic import launch

# How long the least number of hosts waits for further ones, at each start and restart; torch's default is 30. A host
# that comes later joins by a restart.
# Chosen: far longer than hosts that are started by one command are apart.
_LAST_CALL_SECONDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--nproc", type=checked(positive), default=_processes_here(), help="processes on this host")
    parser.add_argument("--nnodes", default="1", help="number of hosts, or MIN:MAX")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where several hosts meet")
    parser.add_argument("--rendezvous-id", default="autopar", help="the same on every host of one run")
    parser.add_argument(
        "--max-restarts", type=checked(not_negative), default=0, help="of the whole group after a failure (0)"
    )
    parser.add_argument(
        "--grace", metavar="SECONDS", type=checked(not_negative), default=30,
        help="between SIGTERM and SIGKILL of a process, to save a checkpoint (30)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", metavar="PLAN", help="a plan's path or URL, for calls of autopar.parallelize that are given none"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("script", help="a training script that calls autopar.parallelize")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    if not arguments.module and not Path(arguments.script).is_file():
        raise OptionsError(f"there is no script {arguments.script!r} in {os.getcwd()}")
    if arguments.rendezvous is not None:
        check_endpoint(arguments.rendezvous)
    if arguments.plan is not None:
        Plan.load(arguments.plan)
    options, command = _launcher_options(arguments), _rank_command(arguments)
    before, start = dict(os.environ), time.perf_counter()
    os.environ.update(_launch_environment(arguments.plan))
    try:
        with late_ranks_named():
            status, said = launch(options, command, arguments.grace)
    finally:
        os.environ.clear()
        os.environ.update(before)
    if said:
        print(said, file=sys.stderr)
    if output.json:
        seconds = time.perf_counter() - start
        output.result(
            "",
            {
                "ok": status == OK,
                "returncode": status,
                "seconds": seconds,
                "command": [*options, "--no-python", *command],
            },
        )
    return status


def _rank_command(arguments: argparse.Namespace) -> list[str]:
    """The command of a rank, which dies with this process."""
    through = [sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid())]
    module = ["-m"] if arguments.module else []
    return [*through, sys.executable, "-u", *module, arguments.script, *arguments.arguments]


def _launcher_options(arguments: argparse.Namespace) -> list[str]:
    """Options of ``torch.distributed.run``; several hosts meet at ``--rendezvous``."""
    options = [f"--nproc-per-node={arguments.nproc}", f"--max-restarts={arguments.max_restarts}"]
    if arguments.rendezvous is None:
        if arguments.nnodes != "1":
            raise OptionsError(f"--nnodes {arguments.nnodes} needs --rendezvous HOST:PORT, the same on every host")
        return [*options, "--standalone"]
    return [
        *options,
        f"--nnodes={arguments.nnodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={arguments.rendezvous}",
        f"--rdzv-id={arguments.rendezvous_id}",
        f"--rdzv-conf=last_call_timeout={_LAST_CALL_SECONDS}",
    ]


def _launch_environment(plan: str | None) -> dict[str, str]:
    """The ``plan`` to train under. One thread per process unless the user's environment says otherwise, and a new store
    for every restart: gloo does not reconnect reliably on the launcher's."""
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**defaults, **os.environ, **({} if plan is None else {PLAN_VARIABLE: plan})}


def _processes_here() -> int:
    return torch.cuda.device_count() or os.cpu_count() or 1
