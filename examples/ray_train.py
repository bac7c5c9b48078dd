"""Trains in the workers of Ray Train, and goes on from a checkpoint of autopar when one of them is lost.

    pip install "autopar[ray]" transformers
    python examples/ray_train.py --workers 2 --folder checkpoints

On a cluster of several hosts (``ray start``), ``--folder`` is one that they share. Ray's TorchTrainer starts the
workers and joins them by torch.distributed, so ``autopar.parallelize`` finds them as under torchrun, and its mesh is
that of all workers. Nothing is wrapped: neither ``ray.train.torch.prepare_model``, which would put
DistributedDataParallel around the model, nor ``prepare_data_loader``.

When a worker dies, Ray starts all of them again (``FailureConfig``). Each start loads the newest complete checkpoint,
whatever the number of workers that wrote it.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
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


def train(config: Mapping[str, Any], report: Callable[[dict[str, Any]], None] = ray.train.report) -> None:
    """What every worker runs. ``report``: takes the figures of each step, on every worker."""
    torch.manual_seed(0)
    model = autopar.parallelize(LlamaForCausalLM(CONFIG), (dist.get_world_size(),))
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    loader = model.dataloader(Windows(), config["batch"], shuffle=True, seed=0, drop_last=True)
    checkpoints = Checkpointer(config["folder"], model, optimizer, dataloader=loader, every=config["every"])
    with checkpoints:
        step = checkpoints.resume().step
        for batch in loader:
            if step == config["steps"]:
                break
            optimizer.zero_grad()
            loss = model.step(**batch)
            optimizer.step()
            step += 1
            checkpoints.step(step)
            report({"step": step, "loss": float(loss), "workers": dist.get_world_size()})


def trainer_of(arguments: argparse.Namespace, loop: Callable[[dict[str, Any]], None] = train) -> TorchTrainer:
    """Ray's trainer of ``loop`` on so many workers."""
    folder, gpus = Path(arguments.folder).absolute(), torch.cuda.is_available()
    return TorchTrainer(
        loop,
        train_loop_config={**vars(arguments), "folder": str(folder)},
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=gpus),
        run_config=RunConfig(
            name="autopar", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", required=True, help="of the checkpoints; all hosts share it")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--batch", type=int, default=24, help="the global batch")
    made.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    return made


def main() -> None:
    result = trainer_of(parser().parse_args()).fit()
    print(f"done: {result.metrics}")


if __name__ == "__main__":
    main()
