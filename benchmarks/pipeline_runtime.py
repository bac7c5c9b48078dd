"""Step time of autopar's pipeline runtime compared with torch.distributed.pipelining: the same transformer in the same
stages under the same schedule, in the same processes.

    python -m benchmarks.pipeline_runtime [--json] [--output FILE] [--stages 2] [--microbatches 8] [--rounds 24]

Both take turns in one process group, in an order drawn anew each round, so that a busy machine slows them alike. A
figure is the median over the rounds of a step as its slowest process sees it. Before anything is timed, all gradients
must be equal.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from autopar.cluster.description import Cluster
from autopar.compiler.pipeline import pipeline_program
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.placements import REPLICATE
from autopar.passes.annotate.annotate import annotate
from autopar.passes.normalise.standard import normalise
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.microbatch import microbatch
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.planner.step_graphs import bare_step_graph
from autopar.runtime import Compiled, ParallelModule, Request, run_local
from autopar.search.fitting_schedules import scheduled
from autopar.search.schedules.chunks import WirePrice, place_chunks
from autopar.trace.tracer import trace

from .report import describe_machine, emit, make_table

WIDTH, HEADS, SEQUENCE, BATCH, BLOCKS = 256, 4, 128, 16, 8
WARMUP = 3
Step = Callable[[], Any]


@dataclass(frozen=True)
class Kind:
    """One schedule under both names; ``chunks`` per rank, ``v_shaped`` as ZB-V places them."""

    own: str
    theirs: Any
    chunks: int = 1
    v_shaped: bool = False

    def held(self, rank: int, stages: int) -> list[int]:
        """The chunks of a rank."""
        if self.v_shaped:
            return [rank, 2 * stages - 1 - rank]
        return [rank + stages * k for k in range(self.chunks)]


KINDS = {
    "GPipe": Kind("gpipe", ScheduleGPipe),
    "1F1B": Kind("1f1b", Schedule1F1B),
    "Interleaved1F1B": Kind("interleaved", ScheduleInterleaved1F1B, 2),
    "ZBV": Kind("zb-v", ScheduleZBVZeroBubble, 2, True),
}


class Block(nn.Module):
    """A transformer's, before normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        done: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return done


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.mse_loss(output, target)
    return loss


class Whole(nn.Module):
    """All blocks, and the loss."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return squares(x, target)


def cuts_before(graph: Graph, blocks: list[int]) -> tuple[str, ...]:
    """The first node of each of ``blocks``."""
    forward = [node for node in graph if node.phase == "forward" and not node.is_placeholder]
    return tuple(next(n.name for n in forward if n.module.startswith(f"blocks.{block}.")) for block in blocks)


def replicated(graph: Graph, mesh: tuple[int, ...]) -> Assignment:
    """Everything whole: there is one device for each stage."""
    whole = (REPLICATE,) * len(mesh)
    parameters = {node.name: ParameterPlacement(whole, whole, whole) for node in graph.placeholders("param")}
    strategies = {}
    for node in graph:
        if node.op != "param":
            offered = graph.strategies[node.name]
            strategies[node.name] = next(s for s in offered if {*s.inputs, *s.outputs} <= {whole})
    return Assignment(mesh, strategies, parameters)


def own_step(model: Whole, kind: Kind, stages: int, count: int, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    """A step of autopar's runtime; parameters have their gradients afterwards."""
    mesh = init_device_mesh("cpu", (stages, 1))

    def compile(request: Request) -> Compiled:
        traced = trace(model, request.args, request.kwargs, device="cpu", training=True, grad=True)
        graph = bare_step_graph(normalise(traced.graph), traced.signature.loss, BATCH)
        pieces = microbatch(graph, count)
        chunks = stages * kind.chunks
        each = BLOCKS // chunks
        staged = cut(pieces, cuts_before(pieces.graph, [each * c for c in range(1, chunks)]))
        schedule = scheduled((kind.own, kind.chunks), stages, count, staged)
        whole = annotate(SaveActivations()(pieces.graph), (1,))
        prices = Prices.of(Cluster.get("local"), (1,), whole)
        links = {(edge.source, edge.target): WirePrice(1e-5, 1e9) for edge in staged.edges}
        placed, wires = place_chunks(staged, [replicated(whole, (1,))] * chunks, [prices] * chunks, links)
        rank, paths = dist.get_rank(), [prices.path] * stages
        program = pipeline_program(pieces, staged, placed, wires, schedule, rank, paths, BUCKET_BYTES, prices.messages)
        return Compiled(program, traced.signature, None, str(schedule))

    parallel = ParallelModule(model, mesh, compile)

    def step() -> Any:
        parallel.zero_grad()
        return parallel.step(*batch)

    return step


def torch_step(blocks: nn.ModuleList, kind: Kind, stages: int, count: int, batch: tuple[torch.Tensor, ...]) -> Step:
    """The same under torch.distributed.pipelining."""
    rank, chunks = dist.get_rank(), stages * kind.chunks
    each = BLOCKS // chunks
    held = kind.held(rank, stages)
    parts = {c: nn.Sequential(*blocks[each * c : each * (c + 1)]) for c in held}
    pipeline = [PipelineStage(parts[c], c, chunks, torch.device("cpu")) for c in held]
    schedule = kind.theirs(pipeline if kind.chunks > 1 else pipeline[0], count, loss_fn=squares)
    given = (batch[0],) if 0 in held else ()
    wanted = {"target": batch[1]} if chunks - 1 in held else {}

    def step() -> Any:
        for part in parts.values():
            part.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*given, **wanted, **({"losses": losses} if wanted else {}))
        return losses

    return step


def _check(own: Whole, theirs: nn.ModuleList) -> None:
    """Both have the same gradients where this rank has any."""
    other = {f"blocks.{name}": p.grad for name, p in theirs.named_parameters()}
    checked = 0
    for name, parameter in own.named_parameters():
        gradient = other[name]
        local = parameter.grad.to_local()  # type: ignore[union-attr]
        if gradient is not None:
            torch.testing.assert_close(local, gradient, rtol=1e-4, atol=1e-7)
            checked += 1
    assert checked


def _seconds(step: Step) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(rank: int, world: int, name: str, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's step of both."""
    kind = KINDS[name]
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    batch = (torch.randn(BATCH, SEQUENCE, WIDTH), torch.randn(BATCH, SEQUENCE, WIDTH))
    whole = Whole(copy.deepcopy(blocks))
    steps = {
        "own": own_step(whole, kind, world, count, batch),
        "torch": torch_step(blocks, kind, world, count, batch),
    }
    for _ in range(WARMUP):
        for step in steps.values():
            step()
    _check(whole, blocks)
    found: dict[str, list[float]] = {"own": [], "torch": []}
    order = random.Random(0)
    for _ in range(rounds):
        for which in order.sample(sorted(steps), len(steps)):
            found[which].append(_seconds(steps[which]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--schedules", nargs="+", choices=list(KINDS), default=list(KINDS))
    asked = parser.parse_args()
    figures: dict[str, Any] = {
        "benchmark": "pipeline_runtime",
        "model": f"{BLOCKS} blocks of width {WIDTH}, batch {BATCH} x {SEQUENCE}, fp32",
        "stages": asked.stages,
        "microbatches": asked.microbatches,
        "rounds": asked.rounds,
        "machine": describe_machine(),
        "schedules": {},
    }
    rows = []
    for name in asked.schedules:
        seconds = run_local(measure, asked.stages, timeout=300, args=(name, asked.microbatches, asked.rounds))[0]
        own, theirs = (statistics.median(seconds[which]) for which in ("own", "torch"))
        figures["schedules"][name] = {"own": own, "torch": theirs, "ratio": own / theirs, "seconds": seconds}
        rows.append((name, f"{own * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{own / theirs:.3f}"))
    table = make_table("Step of a pipeline, ms", ("schedule", "autopar", "torch", "ratio"), rows)
    emit(figures, table, asked.json, asked.output)


if __name__ == "__main__":
    main()
