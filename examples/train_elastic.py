"""Trains on however many processes there are, survives losing some, and uses those that come back.

    autopar run --nproc 4 --max-restarts 3 examples/train_elastic.py --folder checkpoints

On several hosts, of which any may go and come, the same command on each; HOST is one that stays:

    autopar run --nnodes 1:4 --nproc 2 --rendezvous HOST:29400 --max-restarts 10 examples/train_elastic.py \\
        --folder SHARED

When a process or a host is lost, torch's elastic launcher starts the group again with those that are left, and once
more when a host joins. Each start plans for the devices that there are, loads the newest checkpoint, whatever mesh
wrote it, and goes on. Plans for one host less and one more are made beside training, so that a restart finds them in
the cache. What becomes of the global batch is the user's choice, ``--global-batch``:

- ``kept`` (default): every rank passes all of it, and the plan divides it among devices. The losses are those of an
  undisturbed run.
- ``accumulated``: the same batch, in parts of at most ``--rows`` for each process, whose gradients are added: for
  memory that does not grow when processes are lost. The same losses.
- ``scaled``: ``--rows`` for each process, so it follows the number of processes, and so does the learning rate. Samples
  are counted, so none is left out or used twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.checkpoint import Checkpointer

SEQUENCE = 64
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=SEQUENCE, use_cache=False,
)  # fmt: skip


def read_corpus() -> torch.Tensor:
    """The bytes of the standard library's own source files: uint8 [n]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch_of(corpus: torch.Tensor, first: int, size: int, device: str) -> dict[str, torch.Tensor]:
    """The samples ``first``, ``first + 1``, ...: int64 [size, SEQUENCE]. Each is a function of its number, so that a
    restart needs no state."""
    starts = [
        torch.randint(len(corpus) - SEQUENCE, (1,), generator=torch.Generator().manual_seed(number))
        for number in range(first, first + size)
    ]
    windows = corpus[torch.stack(starts) + torch.arange(SEQUENCE)].long().to(device)
    return {"input_ids": windows, "labels": windows}


def global_batch(arguments: argparse.Namespace, processes: int) -> tuple[int, int]:
    """The rows of a step, and the most that are computed at a time."""
    at_a_time = arguments.rows * processes
    match arguments.global_batch:
        case "kept":
            return arguments.batch, arguments.batch
        case "accumulated":
            return arguments.batch, min(at_a_time, arguments.batch)
    return at_a_time, at_a_time


def step_of(model: Any, batch: dict[str, torch.Tensor], most: int) -> float:
    """Adds the gradients of the mean loss of ``batch``, at most so many rows at a time; returns that loss."""
    size = len(batch["labels"])
    parts = [{name: value[at : at + most] for name, value in batch.items()} for at in range(0, size, most)]
    weights = [len(part["labels"]) / size for part in parts]
    return sum(weight * float(model.step(**part, scale=weight)) for part, weight in zip(parts, weights, strict=True))


def train(arguments: argparse.Namespace, device: str) -> None:
    corpus, (size, most) = read_corpus(), global_batch(arguments, dist.get_world_size())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    first = batch_of(corpus, 0, most, device)
    model = autopar.parallelize(LlamaForCausalLM(CONFIG), mesh, example_inputs=first)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    checkpoints = Checkpointer(arguments.folder, model, optimizer, every=arguments.every)
    autopar.plan_ahead(model, {number: global_batch(arguments, number)[1] for number in other_sizes()})
    with autopar.stopping() as stop, checkpoints:
        found = checkpoints.resume()
        samples = found.extra["samples"] if found.step else 0
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * size / arguments.batch
        for step in range(found.step, arguments.steps):
            optimizer.zero_grad()
            loss = step_of(model, batch_of(corpus, samples, size, device), most)
            optimizer.step()
            samples += size
            report(arguments.log, step, loss, samples)
            checkpoints.step(step + 1, extra={"samples": samples})
            if stop:
                checkpoints.save(step + 1, extra={"samples": samples})
                break


def other_sizes() -> list[int]:
    """The numbers of processes with one host less, and with one more."""
    world, host = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return [size for size in (world - host, world + host) if size > 0]


def report(log: str | None, step: int, loss: float, samples: int) -> None:
    """Prints a line on rank 0, and appends it to the file ``log`` as JSON."""
    if dist.get_rank() != 0:
        return
    print(f"step {step}: loss {loss:.4f} on {dist.get_world_size()} processes", flush=True)
    if log is not None:
        line = {"step": step, "loss": loss, "samples": samples, "processes": dist.get_world_size(), "time": time.time()}
        with open(log, "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="of the checkpoints; all hosts share it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24, help="the global batch, for which the learning rate is set")
    parser.add_argument("--global-batch", choices=("kept", "accumulated", "scaled"), default="kept")
    parser.add_argument("--rows", type=int, default=3, help="rows of a process at a time, unless the batch is kept")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--log", help="a file for one JSON line a step")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    train(parser.parse_args(), device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
