"""Tensors outside of the device's memory: seconds predicted against measured, beside none, on local processes.

    python -m benchmarks.offload [--processes N] [--rounds N] [--cluster FILE] [--json] [--output FILE]

First the machine is measured, as ``autopar calibrate`` and ``autopar calibrate --disk`` do, and the rate at which
processes copy memory, which host memory is to them; and again in the end, since a virtual machine's speed changes by
a third from one minute to the next. Prices are the means of both. In between one decoder trains under several plans in
the same processes, taking turns: with everything on the device, with optimizer state in host memory, with optimizer
state on the disk of ``$AUTOPAR_OFFLOAD``, and with saved activations or weights in host memory; weights have the same
placements in all. A disk of a virtual machine is twice as fast in one second as in another: it is measured directly
before and after each step that uses it, and that step is priced with the mean of both. Given are medians of rounds,
predicted and measured: of the step, and of the part that a tier changes, the update or the rest of the step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import autopar
from autopar.calibration.disk import calibrate_disk, with_disk
from autopar.calibration.machine import calibrate
from autopar.calibration.measure_disk import DiskRounds, DiskSample
from autopar.cluster.description import Cluster, machine_memory
from autopar.ir.placements import short
from autopar.planner.prepare import prepare
from autopar.runtime.launch import run_local
from autopar.search.reprice import reprice

from .memory import Decoder
from .report import describe_machine, emit, make_table

ROWS, TOKENS, VOCABULARY, WIDTH, LAYERS = 4, 64, 256, 512, 4
# Small, and so is the vocabulary: where gradients are zero, or so small that their squares are denormal, as once a
# model has learnt its only batch, an update takes processors ten times as long.
LEARNING_RATE = 1e-5
# What rests elsewhere, and which part of a step that changes.
WAYS: Mapping[str, tuple[Any, str]] = {
    "nothing": (False, "update"),
    "optimizer state in host memory": ({"optimizer": "host", "activations": "device"}, "update"),
    "optimizer state on the disk": ({"optimizer": "nvme", "activations": "device"}, "update"),
    "activations in host memory": ({"optimizer": "device", "activations": "host"}, "rest"),
    "weights in host memory": ({"optimizer": "device", "activations": "device", "weights": "host"}, "rest"),
}
# As long as states of the model's matrices are, and together more than the processor's caches hold, as they are.
COPIED_ELEMENTS, COPIED_TENSORS = 1 << 20, 32


def copy_bandwidth(rank: int, world: int, rounds: int) -> float:
    """Bytes per second at which a process copies tensors to one place and back, in turns, while all do: as the runtime
    moves state (:mod:`autopar.runtime.state.host_visits`), which is in no cache when its turn comes."""
    resting, place = [torch.ones(COPIED_ELEMENTS) for _ in range(COPIED_TENSORS)], torch.empty(COPIED_ELEMENTS)
    seconds = list[float]()
    for _ in range(rounds):
        for state in resting:
            dist.barrier()
            begin = time.perf_counter()
            place.copy_(state)
            state.copy_(place)
            seconds.append(time.perf_counter() - begin)
    return 2 * 4 * COPIED_ELEMENTS / statistics.median(seconds)


def measured_cluster(processes: int) -> Cluster:
    """This machine, with its disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "local.toml")
        return calibrate_disk(calibrate(processes, 25.0, path), processes, 6.0, path)


def with_host_memory(cluster: Cluster, processes: int, rounds: int) -> Cluster:
    """``cluster`` whose processes have host memory, which is a copy."""
    rates = run_local(copy_bandwidth, processes, timeout=300, args=(rounds,))
    share = machine_memory() // (2 * processes)
    device = replace(cluster.device, host_bandwidth=statistics.fmean(rates), host_memory_bytes=share)
    return replace(cluster, device=device)


def predicted(plan: Any) -> dict[str, float]:
    """Seconds of the step, of its update and of the rest."""
    update = plan.seconds_of("optimizer", "offload")
    return {"step": plan.predicted.step_seconds, "update": update, "rest": plan.predicted.step_seconds - update}


def token_ids() -> torch.Tensor:
    """The batch."""
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def options_of(offload: Any, pins: Mapping[str, str] | None = None) -> autopar.Options:
    """Of all ways; only ``offload`` differs. ``pins``: placements of weights, by path."""
    return autopar.Options(
        offload=offload, stages=1, mesh_search=False, microbatches=1, zero=1, recompute="none", check_inputs="never",
        pins=pins or {},
    )  # fmt: skip


def decoder() -> Decoder:
    """The model, the same each time."""
    torch.manual_seed(0)
    return Decoder(WIDTH, 8, LAYERS, VOCABULARY)


def plan_of(offload: Any, processes: int, cluster: Cluster, pins: Mapping[str, str]) -> Any:
    """A plan of the model."""
    options = options_of(offload, pins)
    return autopar.plan(decoder(), (processes,), (token_ids(),), cluster=cluster, options=options)


def weights_of(plan: Any) -> dict[str, str]:
    """Pins that give weights the placements of ``plan``."""
    return {path: ",".join(map(short, each.weight)) for path, each in plan.parameters.items()}


def work(
    rank: int, world: int, cluster: Cluster, pins: Mapping[str, str], rounds: int
) -> tuple[dict[str, Any], dict[str, list[DiskSample]]]:
    """By way, seconds of each round, and whether losses are those of nothing offloaded; and the disk around each step
    that uses it."""
    ids = token_ids()
    made: dict[str, tuple[Any, torch.optim.Optimizer]] = {}
    for name, (offload, _) in WAYS.items():
        options = options_of(offload, pins)
        parallel = autopar.parallelize(decoder(), (world,), (ids,), options=options, cluster=cluster)
        made[name] = parallel, parallel.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    disk = DiskRounds(dist.barrier)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    losses: dict[str, list[float]] = {name: [] for name in made}
    disks: dict[str, list[DiskSample]] = {name: [] for name in made if uses_disk(name)}
    for turn in range(rounds + 2):
        for name, (model, optimizer) in made.items():
            if name in disks:
                disk.once()
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(float(model.step(ids)))
            dist.barrier()
            middle = time.perf_counter()
            optimizer.step()
            dist.barrier()
            end = time.perf_counter()
            optimizer.zero_grad()
            if name in disks:
                disk.once()
            if turn > 1:  # The first steps make state and files.
                seconds[name].append({"step": end - begin, "update": end - middle, "rest": middle - begin})
                if name in disks:
                    disks[name].append(disk.sample(statistics.fmean, last=2))
    placed = {name: model.plan.strategies for name, (model, _) in made.items()}
    ways = {
        name: {
            "rounds": seconds[name],
            "same_losses": losses[name] == losses["nothing"],
            "same_placements": placed[name] == placed["nothing"],
        }
        for name in made
    }
    return ways, disks


def uses_disk(name: str) -> bool:
    """Whether a way keeps anything on the disk."""
    offload, _ = WAYS[name]
    return isinstance(offload, Mapping) and "nvme" in offload.values()


def prices_of(
    plan: Any, disks: Sequence[Sequence[DiskSample]], clusters: Sequence[Cluster], rounds: int
) -> list[dict[str, float]]:
    """What ``plan`` says of each round, with the disk as the processes measured it around that: the mean over
    ``clusters``."""
    prepared = prepare(decoder(), (token_ids(),), {}, device="cpu", loss_fn=None)
    options = options_of(False)

    def said(cluster: Cluster) -> dict[str, float]:
        return predicted(reprice(plan, prepared, ROWS, cluster=cluster, options=options))

    if not disks:
        return [_mean([said(cluster) for cluster in clusters])] * rounds
    return [
        _mean([said(replace(cluster, device=with_disk(cluster.device, samples))) for cluster in clusters])
        for samples in disks
    ]


def _mean(said: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: statistics.fmean(each[part] for each in said) for part in said[0]}


def row_of(
    name: str, each: Mapping[str, Any], disks: Sequence[Sequence[DiskSample]], clusters: Sequence[Cluster], plan: Any
) -> dict[str, Any]:
    """The figures of one way. ``each``: what the first process measured; ``disks``: by round, those of all."""
    rounds = each["rounds"]
    said = prices_of(plan, disks, clusters, len(rounds))
    parts = ("step", "update", "rest")
    return {
        "offloaded": name, "part": WAYS[name][1],
        "predicted": {k: statistics.median(s[k] for s in said) for k in parts},
        "measured": {k: statistics.median(r[k] for r in rounds) for k in parts},
        "error": {k: statistics.median(s[k] / r[k] - 1 for s, r in zip(said, rounds, strict=True)) for k in parts},
        "same_losses": each["same_losses"], "same_placements": each["same_placements"],
        "peak_bytes": plan.predicted.peak_bytes, "rounds": rounds,
        "predicted_rounds": said if disks else [],
    }  # fmt: skip


def figures(processes: int, rounds: int, cluster: Cluster | None) -> dict[str, Any]:
    """All figures of a run."""
    begin = time.perf_counter()

    def measured() -> Cluster:
        return with_host_memory(cluster or measured_cluster(processes), processes, rounds)

    whole = measured()
    pins = weights_of(plan_of(False, processes, whole, {}))
    ranks = run_local(work, processes, timeout=900, args=(whole, pins, rounds))
    clusters = [whole, measured()]
    rows = []
    for name, (offload, _) in WAYS.items():
        disks = list(zip(*(found.get(name, ()) for _, found in ranks), strict=True))
        plan = plan_of(offload, processes, whole, pins)
        rows.append(row_of(name, ranks[0][0][name], disks, clusters, plan))
    names = ("nvme_read_bandwidth", "nvme_write_bandwidth", "nvme_latency", "host_bandwidth")
    return {
        "benchmark": "offload",
        "machine": describe_machine(),
        "processes": processes,
        "cluster": whole.source,
        "rates": {name: statistics.fmean(getattr(each.device, name) for each in clusters) for name in names},
        "parameters": sum(p.numel() for p in decoder().parameters()),
        "ways": rows,
        "seconds": time.perf_counter() - begin,
        "load_average": os.getloadavg()[0],  # Of the last minute: above the processes, others were at work too.
    }


def table(found: Mapping[str, Any]) -> Table:
    """For people."""
    cells = []
    for row in found["ways"]:
        pairs = [(row["predicted"][k], row["measured"][k], row["error"][k]) for k in ("step", "update", "rest")]
        numbers = [f"{1e3 * said:.0f} / {1e3 * was:.0f} ({error:+.0%})" for said, was, error in pairs]
        same = ["yes" if row[name] else "no" for name in ("same_placements", "same_losses")]
        cells.append([row["offloaded"], *numbers, *same])
    columns = ["outside of the device's memory", "step", "update", "rest", "same placements", "same losses"]
    return make_table("offload: ms predicted / measured", columns, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--cluster", help="a description of this machine, with a disk, of which only the disk is measured then"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", help="also write the JSON to this file")
    given = parser.parse_args(arguments)
    found = figures(given.processes, given.rounds, Cluster.get(given.cluster) if given.cluster else None)
    emit(found, table(found), given.json, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
