"""A training that saves every few steps, and notes its steps: ``killed_training.py FOLDER STEPS EVERY``. Started and
killed by :mod:`benchmarks.kills`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.checkpoint import Checkpointer


class Net(nn.Module):
    """Three layers with dropout, whose random numbers have to go on as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), y)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    x = torch.randn(16, 16, generator=source)
    return x, x[:, :4].argmax(1)


def main(folder: Path, steps: int, every: int) -> None:
    """Writes this rank's process id, and on rank 0 a line for each step."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = autopar.parallelize(Net(), (world,), batch_of(0), options=autopar.Options(zero=3, seed=0))
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    with Checkpointer(folder / "checkpoints", model, optimizer, every=every) as checkpoints:
        for step in range(checkpoints.resume().step, steps):
            loss = float(model.step(*batch_of(step)))
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                with (folder / "log").open("a") as log:
                    log.write(json.dumps({"step": step, "loss": loss, "time": time.time()}) + "\n")
            checkpoints.step(step + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
