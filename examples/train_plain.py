"""The smallest training script: the one call, and then a training loop like any other.

    torchrun --nproc-per-node 4 examples/train_plain.py

The planner traces the model at the first batch it sees, so ``parallelize`` needs the model and the mesh,
nothing else. The loop is ordinary PyTorch: from that batch on the parameters are DTensors, which every torch
optimizer and ``clip_grad_norm_`` understand.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

STEPS, BATCH, FEATURES, CLASSES = 50, 64, 32, 10


class Classifier(nn.Module):
    """A plain module that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, CLASSES))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(features), labels)


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and the class a fixed rule gives them; every process makes the same global batch."""
    features = torch.randn(BATCH, FEATURES, generator=generator)
    return features, features[:, :CLASSES].argmax(dim=1)


def main() -> None:
    device_type = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same weights on every process
    model = autopar.parallelize(Classifier(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        features, labels = make_batch(generator)
        loss = model(features.to(device_type), labels.to(device_type))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3d}   loss {loss.item():.4f}   gradient norm {float(norm):.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
