"""The baselines that a plan lists, priced and measured: DDP, FSDP2 and tensor parallelism as torch has them.

    python -m benchmarks.baselines [--json] [--output FILE] [--model llama mlp] [--processes 4]

For each model all variants run on the same processes in one run and take turns, as in :mod:`benchmarks.step_time`.
``zero=3`` is the best plan that stores weights in shards, with small weights gathered in messages of several, and
``zero=3, singly`` the best one that gathers every weight by itself. Prices are those of ``autopar.plan`` on a mesh of
one axis, of this machine as calibrated (``autopar calibrate``), or else of the shipped defaults. What counts is the
order, and the ratio to DDP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.ir import weight_messages
from examples.demo import batches, read_corpus

from .local_ranks import run_as_ranks
from .report import describe_machine, emit, make_table
from .step_time import PROCESSES, make_model, measure
from .variants import Step, adamw, ddp, fsdp, tp

WARMUP_STEPS = 2
SINGLY = "zero=3, singly"


class Mlp(nn.Module):
    """Four wide blocks in a list and a cross entropy: little computing for its weights."""

    def __init__(self, width: int = 256, inner: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(4)
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), y)


@dataclass(frozen=True)
class Case:
    """A model, its global batch, and the variants that run it."""

    model: Callable[[], nn.Module]
    batch: object
    variants: Mapping[str, Callable[[], Step]]


def _llama() -> Case:
    batch = next(batches(read_corpus(), "cpu"))

    def variant(make: Callable[..., Step]) -> Callable[[], Step]:
        return lambda: make(make_model("cpu"), batch, "cpu")

    variants = {"DDP": variant(ddp), "FSDP2": variant(fsdp), "TP": variant(tp)}
    return Case(lambda: make_model("cpu"), batch, variants)


def _mlp() -> Case:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 256, generator=generator), torch.randint(0, 16, (256,), generator=generator)
    own = tuple(each.chunk(dist.get_world_size())[dist.get_rank()] for each in (x, y))

    def replicated() -> Step:
        return _step(DistributedDataParallel(Mlp()), own)

    def sharded() -> Step:
        model, mesh = Mlp(), init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _step(model, own)

    def tensor() -> Step:
        model, mesh = Mlp(), init_device_mesh("cpu", (dist.get_world_size(),))
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, {f"blocks.{i}.{n}": s for i in range(4) for n, s in styles.items()})
        return _step(model, (x, y))

    return Case(Mlp, (x, y), {"DDP": replicated, "FSDP2": sharded, "TP": tensor})


def _step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Step:
    optimizer = adamw(list(model.parameters()))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _autopar(case: Case, plan: autopar.Plan) -> Step:
    model = autopar.parallelize(case.model(), init_device_mesh("cpu", (dist.get_world_size(),)), plan=plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
    batch = case.batch

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model.step(**batch) if isinstance(batch, Mapping) else model.step(*batch)  # type: ignore[misc]
        optimizer.step()
        return loss

    return step


@contextmanager
def _gathered_singly() -> Iterator[None]:
    """No weight is gathered with others. Plans that are cached were made otherwise."""
    with patch.object(weight_messages, "SMALL_BYTES", 0), patch.dict(os.environ, {"AUTOPAR_CACHE": "off"}):
        yield


CASES: Mapping[str, Callable[[], Case]] = {"llama": _llama, "mlp": _mlp}


def compare(name: str, rounds: int, count: int) -> dict[str, object]:
    """Prices and measured medians (seconds) of one case, on rank 0's clock; collective."""
    case, world = CASES[name](), dist.get_world_size()
    steps = {variant: make() for variant, make in case.variants.items()}
    plans: dict[str, autopar.Plan] = {}
    for key in ("autopar", "zero=3", SINGLY):
        zero: Literal[3] | None = None if key == "autopar" else 3
        with _gathered_singly() if key == SINGLY else nullcontext():
            options = autopar.Options(mesh_search=False, stages=1, microbatches=1, zero=zero)
            plans[key] = autopar.plan(case.model(), (world,), case.batch, options=options)  # type: ignore[arg-type]
            steps[key] = _autopar(case, plans[key])
            steps[key]()  # Its program is lowered here.
    plan = plans["autopar"]
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    measured = {key: statistics.median(found) for key, found in measure(steps, rounds, count, "cpu").items()}
    names = {"DDP": "data parallel", "FSDP2": "FSDP", "TP": f"tensor parallel {world}"}
    priced = {key: plan.baselines[line] for key, line in names.items()}
    seconds = {key: figures.step_seconds for key, figures in priced.items() if figures is not None}
    seconds |= {key: each.predicted.step_seconds for key, each in plans.items()}
    return {"model": plan.model, "predicted_seconds": seconds, "measured_seconds": measured}


def run(arguments: argparse.Namespace) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {name: compare(name, arguments.rounds, arguments.steps) for name in arguments.model}
    if dist.get_rank() == 0:
        report(found, arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(found: Mapping[str, Mapping[str, object]], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    rows = []
    for name, figures in found.items():
        predicted, measured = figures["predicted_seconds"], figures["measured_seconds"]
        assert isinstance(predicted, dict) and isinstance(measured, dict)
        for key in sorted(measured, key=measured.__getitem__):
            sides = [(side[key], side[key] / side["DDP"]) for side in (predicted, measured)]
            rows.append((f"{name} {key}", *(text for s, x in sides for text in (f"{s * 1e3:.1f}", f"{x:.2f}"))))
    columns = ("variant", "predicted ms", "x DDP", "measured ms", "x DDP")
    world = dist.get_world_size()
    caption = f"median of {arguments.rounds} interleaved rounds of {arguments.steps} steps, {world} processes"
    machine = {"benchmark": "baselines", "processes": world, "machine": describe_machine(), "models": found}
    emit(machine, make_table("baselines", columns, rows, caption), arguments.json, arguments.output)


def main(words: Sequence[str]) -> int:
    """Starts several processes of itself, unless this is one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row of one variant within a round")
    parser.add_argument("--model", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--processes", type=int, default=PROCESSES)
    arguments = parser.parse_args(words)
    return run_as_ranks("benchmarks.baselines", words, arguments.processes, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
