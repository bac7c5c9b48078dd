"""Prints a job file for SLURM or Kubernetes."""

from __future__ import annotations

import argparse

from autopar.cli.arguments import add_mesh, checked, not_negative, positive
from autopar.cli.output import Output
from autopar.cli.status import OK
from autopar.errors import OptionsError
from autopar.launchers.job import Job

# Processes of a host where nothing is said. Chosen: GPUs of the hosts that clusters have.
_PROCESSES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("system", choices=("slurm", "kubernetes"))
    parser.add_argument("--hosts", type=checked(positive), default=1, help="hosts, or pods (1)")
    parser.add_argument("--nproc", type=checked(positive), default=_PROCESSES, help="processes on each host (8)")
    parser.add_argument("--gpus", type=checked(not_negative), help="of each host, one for a process; 0: none")
    parser.add_argument("--name", default="autopar", help="of the job")
    parser.add_argument("--max-restarts", type=checked(not_negative), default=0, help="after a failure (0)")
    add_mesh(parser, required=False)
    slurm = parser.add_argument_group("SLURM")
    slurm.add_argument("--time", help="limit, as sbatch takes it: 12:00:00")
    slurm.add_argument("--partition")
    slurm.add_argument("--account")
    slurm.add_argument("--port", type=checked(positive), help="at which hosts meet (29400)")
    slurm.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line before the job: 'module load cuda'; repeats",
    )
    kubernetes = parser.add_argument_group("Kubernetes")
    kubernetes.add_argument("--image", help="container with the script, torch and autopar")
    kubernetes.add_argument(
        "--kind", choices=("trainjob", "pytorchjob"), help="Kubeflow Trainer v2 (trainjob), or operator v1"
    )
    kubernetes.add_argument("--namespace")
    kubernetes.add_argument("--runtime", help="a TrainJob's runtime (torch-distributed)")
    kubernetes.add_argument("--shared-memory", help="/dev/shm of a PyTorchJob's pod (16Gi)")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("script", help="a training script, as for `autopar run`")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the command; returns its exit status."""
    job = Job(
        command=(arguments.script, *arguments.arguments),
        hosts=arguments.hosts,
        processes=arguments.nproc,
        gpus=arguments.nproc if arguments.gpus is None else arguments.gpus,
        module=arguments.module,
        name=arguments.name,
        mesh=arguments.mesh,
        port=arguments.port,
        restarts=arguments.max_restarts,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        setup=tuple(arguments.setup),
        image=arguments.image,
        namespace=arguments.namespace,
        runtime=arguments.runtime,
        shared_memory=arguments.shared_memory,
    )
    if arguments.system == "slurm" and arguments.kind:
        raise OptionsError(f"--kind {arguments.kind} is an option for Kubernetes: leave it out for SLURM")
    system = "slurm" if arguments.system == "slurm" else arguments.kind or "trainjob"
    text = job.write(system)
    output.result(text, {"system": system, "file": text})
    return OK
