"""Trains on however many processes there are, survives losing some, and uses those that come back.

    autopar run --nproc 4 --max-restarts 3 examples/train_elastic.py --folder checkpoints

On several hosts, of which any may go and come, the same command on each; HOST is one that stays:

    autopar run --nnodes 1:4 --nproc 2 --rendezvous HOST:29400 --max-restarts 10 examples/train_elastic.py \\
        --folder SHARED

When a process or a host is lost, torch's elastic launcher starts the group again with those that are left, and once
more when a host joins. Each start plans for the devices that there are (a plan made before comes from the cache), loads
the newest checkpoint, whatever mesh wrote it, and goes on. The global batch stays what it is: every rank passes all of
it, and the plan divides it among devices and microbatches. So the losses are those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

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


def batch_of(corpus: torch.Tensor, step: int, size: int, device: str) -> dict[str, torch.Tensor]:
    """The global batch of a step, int64 [size, SEQUENCE]: a function of the step, so that a restart needs no state."""
    starts = torch.randint(len(corpus) - SEQUENCE, (size, 1), generator=torch.Generator().manual_seed(step))
    windows = corpus[starts + torch.arange(SEQUENCE)].long().to(device)
    return {"input_ids": windows, "labels": windows}


def train(arguments: argparse.Namespace, device: str) -> None:
    corpus, size = read_corpus(), arguments.batch
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    first = batch_of(corpus, 0, size, device)
    model = autopar.parallelize(LlamaForCausalLM(CONFIG), mesh, example_inputs=first)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)

    checkpoints = Checkpointer(arguments.folder, model, optimizer, every=arguments.every)
    with autopar.stopping() as stop, checkpoints:
        for step in range(checkpoints.resume().step, arguments.steps):
            optimizer.zero_grad()
            loss = model.step(**batch_of(corpus, step, size, device))
            optimizer.step()
            report(arguments.log, step, float(loss))
            checkpoints.step(step + 1)
            if stop:
                checkpoints.save(step + 1)
                break


def report(log: str | None, step: int, loss: float) -> None:
    """Prints a line on rank 0, and appends it to the file ``log`` as JSON."""
    if dist.get_rank() != 0:
        return
    print(f"step {step}: loss {loss:.4f} on {dist.get_world_size()} processes", flush=True)
    if log is not None:
        line = {"step": step, "loss": loss, "processes": dist.get_world_size(), "time": time.time()}
        with open(log, "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="of the checkpoints; all hosts share it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24, help="the global batch, the same on any number of processes")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--log", help="a file for one JSON line a step")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    train(parser.parse_args(), device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
