"""Predicted against measured peak memory of different plans, on two local processes.

    python -m benchmarks.memory [--json] [--output FILE]

Measured is the most bytes of tensors alive at once on the fullest rank during a whole training step (forward, backward,
AdamW), counted storage by storage as torch's dispatcher makes and drops them: weights, gradients, optimizer state,
activations, temporaries, and the buffers of collectives and messages. The batch is the caller's and not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Options
from autopar.runtime.launch import run_local
from autopar.runtime.rehearse.storage_meter import StorageMeter

from .report import describe_machine, emit, make_table

PROCESSES = 2
PLANS: Mapping[str, Mapping[str, Any]] = {
    "best": {},
    "data parallel": {"stages": 1, "zero": 0},
    "zero 1": {"stages": 1, "zero": 1},
    "zero 3": {"stages": 1, "zero": 3},
    "full recomputation": {"stages": 1, "recompute": "full"},
    "zero 3, full recomputation": {"stages": 1, "zero": 3, "recompute": "full"},
    "4 microbatches": {"stages": 1, "microbatches": 4},
    "2 stages, 1f1b, 4 microbatches": {"stages": 2, "schedule": "1f1b", "microbatches": 4},
    "bf16, zero 1": {"stages": 1, "zero": 1, "precision": "bf16"},
    "bf16, zero 3": {"stages": 1, "zero": 3, "precision": "bf16"},
    "fp16, 4 microbatches": {"stages": 1, "microbatches": 4, "precision": "fp16"},
    "bf16, 2 stages, 1f1b": {"stages": 2, "schedule": "1f1b", "microbatches": 4, "precision": "bf16"},
    "2 stages, gpipe, full recomputation": {"stages": 2, "schedule": "gpipe", "microbatches": 4, "recompute": "full"},
}


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        parts = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return result


class Decoder(nn.Module):
    """Four blocks between an embedding and a head of their own."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4, vocabulary: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def measure(options: Options, world: int) -> tuple[int, int]:
    """Predicted and measured peak bytes of a step, as this rank has it."""
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (8, 64))
    mesh = init_device_mesh("cpu", (world,))
    model = autopar.parallelize(Decoder(), mesh, options=options, cluster="local")
    model.step(ids)
    while model.overflowed:
        model.zero_grad()
        model.step(ids)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    with StorageMeter() as meter:
        for parameter in model.parameters():
            meter.see(parameter.to_local())  # type: ignore[attr-defined]
            for state in optimizer.state.get(parameter, {}).values():
                meter.see(state.to_local() if hasattr(state, "to_local") else state)
        model.step(ids)
        optimizer.step()
    return model.plan.predicted.peak_bytes, meter.peak


def run() -> list[dict[str, Any]]:
    rows = []
    for name, given in PLANS.items():
        options = Options(mesh_search=False, time_limit=20.0, **given)
        ranks = run_local(lambda _, world, options=options: measure(options, world), PROCESSES, timeout=300.0)
        predicted, measured = ranks[0][0], max(found for _, found in ranks)
        row = {"plan": name, "predicted_bytes": predicted, "measured_bytes": measured}
        rows.append({**row, "error": predicted / measured - 1.0})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    given = parser.parse_args(arguments)
    rows = run()
    found = {"machine": describe_machine(), "processes": PROCESSES, "plans": rows}
    lines = [[r["plan"], f"{r['predicted_bytes']:,}", f"{r['measured_bytes']:,}", f"{r['error']:+.1%}"] for r in rows]
    table = make_table("Peak memory of a rank", ["plan", "predicted bytes", "measured bytes", "error"], lines)
    emit(found, table, given.json, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
