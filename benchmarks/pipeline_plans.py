"""Simulated against measured step time of different plans, on the same four local processes.

    python -m benchmarks.pipeline_plans [--json] [--output FILE]

One plan is the search's own pick, everything free; the others fix stages, schedule and microbatches by options, and
everything else is the planner's. Prices are the calibration of this machine (``autopar calibrate``), if there is one:
make it just before, since the speed of a shared machine changes. All plans live in one run and take turns. A step is
forward, backward and AdamW, as long as on the slowest process.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import Options

from .local_ranks import run_as_ranks
from .report import describe_machine, emit, make_table
from .step_time import measure
from .variants import Step

PROCESSES = 4
BATCH, SEQUENCE = 16, 64
PICKED = "picked by the search"
PLANS: Mapping[str, Mapping[str, Any]] = {
    PICKED: {},
    "one stage": {"stages": 1},
    "one stage, zero 1": {"stages": 1, "zero": 1},
    "one stage, zero 3": {"stages": 1, "zero": 3},
    "one stage, 4 microbatches": {"stages": 1, "microbatches": 4},
    "2 stages, 1f1b, 2 microbatches": {"stages": 2, "schedule": "1f1b", "microbatches": 2},
    "2 stages, gpipe, 8 microbatches": {"stages": 2, "schedule": "gpipe", "microbatches": 8},
    "2 stages, zb-v, 4 microbatches": {"stages": 2, "schedule": "zb-v", "microbatches": 4},
    "2 stages, interleaved, 4 microbatches": {"stages": 2, "schedule": "interleaved", "microbatches": 4},
    "4 stages, 1f1b, 4 microbatches": {"stages": 4, "schedule": "1f1b", "microbatches": 4},
    "4 stages, gpipe, 2 microbatches": {"stages": 4, "schedule": "gpipe", "microbatches": 2},
    "4 stages, zb-h1, 8 microbatches": {"stages": 4, "schedule": "zb-h1", "microbatches": 8},
}


def make_model() -> GPT2LMHeadModel:
    """GPT-2 of 8 layers, 7M parameters, without dropout; the same weights every time."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=256, n_head=4, vocab_size=1000, n_positions=SEQUENCE, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 1000, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau: the share of pairs in the same order, less that of pairs in the other.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.3333333333333333
    """
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(zip(left, right, strict=True), 2)]
    return float(sum((s > 0) - (s < 0) for s in signs)) / len(signs)


def run(arguments: argparse.Namespace) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh, batch = init_device_mesh("cpu", (PROCESSES,)), make_batch()
    steps, plans = {}, {}
    for name in arguments.plans:
        model = autopar.parallelize(make_model(), mesh, options=Options(**PLANS[name]))
        steps[name] = make_step(model, model.optimizer(torch.optim.AdamW, lr=1e-4, foreach=False), batch)
        for _ in range(2):
            steps[name]()
        plans[name] = model.plan
    seconds = measure(steps, arguments.rounds, arguments.steps, "cpu")
    if dist.get_rank() == 0:
        report(plans, {name: statistics.median(found) for name, found in seconds.items()}, arguments)
    dist.barrier()
    dist.destroy_process_group()


def make_step(model: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]) -> Step:
    """A whole training step."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model.step(**batch)
        optimizer.step()
        return loss

    return step


def accuracy(plans: Mapping[str, autopar.Plan], measured: Mapping[str, float]) -> dict[str, Any]:
    """Figures that compare plans with what was measured of them, the quickest first."""
    names = sorted(measured, key=measured.__getitem__)
    predicted = {name: plans[name].predicted.step_seconds for name in names}
    figures: dict[str, Any] = {
        "kendall_tau": rank_correlation([predicted[n] for n in names], [measured[n] for n in names]),
        "mean_absolute_error": statistics.mean(abs(predicted[n] / measured[n] - 1.0) for n in names),
        "plans": {n: {"predicted_seconds": predicted[n], "measured_seconds": measured[n]} for n in names},
    }
    if PICKED in plans:
        picked, others = plans[PICKED], [measured[name] for name in names if name != PICKED]
        described = (
            f"{picked.stages} stages of mesh {picked.mesh}, {picked.schedule}, {picked.microbatches} microbatches"
        )
        figures |= {"picked": described, "picked_to_fastest_other": measured[PICKED] / min(others, default=math.nan)}
    return figures


def accuracy_table(title: str, figures: Mapping[str, Any]) -> Table:
    """The figures of :func:`accuracy` as a table."""
    rows = []
    for name, row in figures["plans"].items():
        took, priced = row["measured_seconds"], row["predicted_seconds"]
        rows.append((name, f"{took * 1e3:.0f}", f"{priced * 1e3:.0f}", f"{priced / took - 1.0:+.0%}"))
    caption = f"Kendall's tau {figures['kendall_tau']:.2f}, mean absolute error {figures['mean_absolute_error']:.0%}"
    if "picked" in figures:
        caption += f"; picked: {figures['picked']}, {figures['picked_to_fastest_other']:.2f} times the fastest other"
    return make_table(title, ("plan", "measured ms", "predicted ms", "error"), rows, caption)


def report(plans: Mapping[str, autopar.Plan], measured: Mapping[str, float], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    plan = next(iter(plans.values()))
    figures = {
        "benchmark": "pipeline_plans",
        "model": f"GPT-2, 8 layers, width 256, batch {BATCH} x {SEQUENCE}, fp32, AdamW, {PROCESSES} processes",
        "cluster": f"{plan.cluster}: {plan.cluster_source}",
        "machine": describe_machine(),
        **accuracy(plans, measured),
    }
    emit(figures, accuracy_table(str(figures["model"]), figures), arguments.json, arguments.output)


def main(words: Sequence[str]) -> int:
    """Starts the processes, unless this is one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_plans", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps in a row of one plan within a round")
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    arguments = parser.parse_args(words)
    return run_as_ranks("benchmarks.pipeline_plans", words, PROCESSES, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
