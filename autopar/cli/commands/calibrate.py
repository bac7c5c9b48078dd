"""Measures this machine; by torchrun, all of a job."""

from __future__ import annotations

import argparse
import os

from autopar.calibration.disk import calibrate_disk
from autopar.calibration.job import calibrate_job, in_job
from autopar.calibration.machine import calibrate as calibrate_machine
from autopar.cli.arguments import checked, positive
from autopar.cli.output import Output
from autopar.cli.status import OK
from autopar.cluster.description import Cluster, local_file
from autopar.errors import OptionsError
from autopar.files import exists
from autopar.runtime.state.disk import offload_folder

# More rounds than this takes change nothing. Chosen.
DISK_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--nproc", type=checked(positive), default=4, help="processes to measure with (4)")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long to measure, about (40)")
    parser.add_argument(
        "--output", metavar="FILE", help="where the description goes: path or URL; default the cache of this user"
    )
    parser.add_argument(
        "--disk",
        action="store_true",
        help="measure only the disk of $AUTOPAR_OFFLOAD, and add it to the description that is there",
    )
    parser.add_argument("--if-missing", action="store_true", help="do nothing where it was measured before")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    if in_job():
        return _calibrate_job(arguments, output)
    target = arguments.output or local_file()
    if arguments.disk:
        before = Cluster.get(arguments.output if arguments.output and exists(arguments.output) else "local")
        with output.progress(f"measuring the disk of {offload_folder()} by {arguments.nproc} processes"):
            cluster = calibrate_disk(before, arguments.nproc, min(arguments.seconds, DISK_SECONDS), arguments.output)
        output.result(cluster, cluster)
        return OK
    if arguments.if_missing and exists(target):
        output.note(f"calibrated already, in {target}; leave out --if-missing to measure again")
        cluster = Cluster.get(arguments.output or "local")
    else:
        with output.progress(f"measuring compute and collectives on {arguments.nproc} processes"):
            cluster = calibrate_machine(arguments.nproc, arguments.seconds, arguments.output)
    output.result(cluster, cluster)
    return OK


def _calibrate_job(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.if_missing:
        raise OptionsError("--if-missing is for one machine: hosts of a job need not have the same files")
    cluster = calibrate_job(arguments.output, arguments.seconds)
    if os.environ["RANK"] == "0":
        output.result(f"{cluster}\nwritten to {arguments.output or local_file(cluster.name)}", cluster)
    return OK
