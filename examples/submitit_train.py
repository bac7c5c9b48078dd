"""Trains in a job that submitit submits, and goes on from a checkpoint when the job is preempted or its time is over.

    pip install submitit transformers
    python examples/submitit_train.py --folder SHARED --nodes 2 --tasks 8      # on a login node of SLURM
    python examples/submitit_train.py --folder checkpoints --cluster local     # on this machine

submitit starts the tasks, and its TorchDistributedEnvironment says how they meet, so ``autopar.parallelize`` finds them
as under torchrun. Before the time of a job is over, or when it is preempted, SLURM sends submitit's signal (SIGUSR2).
``autopar.stopping`` takes it, so that all ranks save after the same step; then submitit gets it, and puts the job into
the queue again. The next start loads that checkpoint, whatever the number of tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.checkpoint import Checkpointer

SEQUENCE = 64
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=SEQUENCE, use_cache=False,
)  # fmt: skip


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of the bytes of the standard library's own source files."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._bytes = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes) // SEQUENCE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._bytes[index * SEQUENCE : (index + 1) * SEQUENCE].long()
        return {"input_ids": window, "labels": window}


def train(folder: str, steps: int, batch: int, every: int) -> bool:
    """Trains until ``steps`` are done, or until a rank is asked to stop: then returns True, on every rank."""
    torch.manual_seed(0)
    model = autopar.parallelize(LlamaForCausalLM(CONFIG), (dist.get_world_size(),))
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    loader = model.dataloader(Windows(), batch, shuffle=True, seed=0, drop_last=True)
    checkpoints = Checkpointer(folder, model, optimizer, dataloader=loader, every=every)
    with autopar.stopping(signal.SIGUSR2) as stop, checkpoints:
        step = checkpoints.resume().step
        for each in loader:
            if step >= steps:
                break
            optimizer.zero_grad()
            loss = model.step(**each)
            optimizer.step()
            step += 1
            report(folder, step, loss)
            checkpoints.step(step)
            if stop:
                checkpoints.save(step)
                break
    return bool(stop) and step < steps


def report(folder: str, step: int, loss: torch.Tensor) -> None:
    """Rank 0 appends a line to the file ``log``."""
    if dist.get_rank() == 0:
        with open(Path(folder) / "log", "a") as log:
            log.write(json.dumps({"step": step, "loss": float(loss), "process": os.getpid()}) + "\n")


@dataclass(frozen=True)
class Training:
    """What submitit runs in every task; ``settings`` are the arguments of :func:`train`."""

    settings: dict[str, Any]

    def __call__(self) -> None:
        submitit.helpers.TorchDistributedEnvironment().export(overwrite=True)
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        has_to_go = train(**self.settings)
        dist.destroy_process_group()
        if has_to_go:
            signal.raise_signal(signal.SIGUSR2)  # Now submitit's: the first task puts the job into the queue again.

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What submitit puts into the queue: the same, since it begins with the newest checkpoint."""
        return submitit.helpers.DelayedSubmission(self)


def submit(arguments: argparse.Namespace) -> submitit.Job[None]:
    """Submits the training; logs of the tasks are in the folder ``submitit``."""
    folder = Path(arguments.folder).absolute()
    executor = submitit.AutoExecutor(folder / "submitit", cluster=arguments.cluster)
    executor.update_parameters(
        nodes=arguments.nodes,
        tasks_per_node=arguments.tasks,
        timeout_min=arguments.minutes,
        slurm_signal_delay_s=120,
        **({"gpus_per_node": arguments.tasks} if torch.cuda.is_available() else {}),
    )
    names = ("steps", "batch", "every")
    return executor.submit(Training({"folder": str(folder), **{name: getattr(arguments, name) for name in names}}))


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", required=True, help="of the checkpoints; all hosts share it")
    made.add_argument("--cluster", help='"local", or by default SLURM where there is one')
    made.add_argument("--nodes", type=int, default=1)
    made.add_argument("--tasks", type=int, default=2, help="of a node: one for each device")
    made.add_argument("--minutes", type=int, default=60, help="after which the job is put into the queue again")
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--batch", type=int, default=24, help="the global batch")
    made.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    return made


def main() -> None:
    job = submit(parser().parse_args())
    print(f"submitted as {job.job_id}", flush=True)
    job.results()


if __name__ == "__main__":
    main()
