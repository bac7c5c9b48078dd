"""Starts a training script on several processes through torch's elastic launcher."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from autopar.cli.arguments import checked, positive
from autopar.cli.output import Output
from autopar.cli.status import FAILED, OK
from autopar.errors import OptionsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--nproc", type=checked(positive), default=_processes_here(), help="processes on this host")
    parser.add_argument("--nnodes", default="1", help="number of hosts, or MIN:MAX")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where several hosts meet")
    parser.add_argument("--rendezvous-id", default="autopar", help="the same on every host of one run")
    parser.add_argument("--max-restarts", type=int, default=0, help="of the whole group after a failure (0)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("script", help="a training script that calls autopar.parallelize")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    if not arguments.module and not Path(arguments.script).is_file():
        raise OptionsError(f"there is no script {arguments.script!r} in {os.getcwd()}")
    command = [sys.executable, "-m", "torch.distributed.run", *_launcher_options(arguments)]
    command += [*(["--module"] if arguments.module else []), arguments.script, *arguments.arguments]
    start = time.perf_counter()
    status = subprocess.run(command, env=_launch_environment(), check=False).returncode
    if output.json:
        seconds = time.perf_counter() - start
        output.result("", {"ok": status == 0, "returncode": status, "seconds": seconds, "command": command})
    return OK if status == 0 else FAILED


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
    ]


def _launch_environment() -> dict[str, str]:
    """One thread per process unless the user's environment says otherwise, and a new store for every restart: gloo does
    not reconnect reliably on the launcher's."""
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**defaults, **os.environ}


def _processes_here() -> int:
    return torch.cuda.device_count() or os.cpu_count() or 1
