"""Measures, in one process, its device and the links to the other processes, while all of them work.

:mod:`autopar.calibration.machine` runs this in processes of its own. Results are plain numbers in JSON, one file per
rank. All figures are measured in several rounds, spread over the whole time: disturbances of a machine last longer than
one measurement, and would otherwise affect only some figures (:mod:`.combine_samples`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.program import COLLECTIVES
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.groups import mesh_groups

from .combine_samples import undisturbed
from .measure_device import mean_seconds, measure_device
from .measure_step import StepSample, step_like, update_like
from .samples import CollectiveSample, Samples

# Chosen: from where latency decides to where bandwidth does.
MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
# Chosen: the fewest that have a lower quartile (docs/cost-model.md, `local`).
ROUNDS = 4
# Seconds of computation between two collectives while synchronisation is measured: about as much as in a step with many
# collectives. If a step has few collectives, they cost little in any case.
# Compared with 1, 16 and 30 ms in docs/cost-model.md, "Synchronisation".
WORK_SECONDS = 0.004
# How many loops in a row make one measurement of synchronisation.
# Chosen: 20 ms of computing together, longer than a time slice.
REPEATS = 5
# Chosen: one product is much shorter than WORK_SECONDS, which consist of several.
SQUARE = (256, 256)


def collective_call(
    kind: str, members: int, nbytes: int, wires: Collectives, axes: tuple[int, ...]
) -> Callable[[], object]:
    """Returns a function that runs a collective as plans do, with a full tensor of about ``nbytes`` bytes."""
    device = wires.groups.device
    part = torch.ones(max(1, nbytes // 4 // members), device=device)
    full = torch.ones(part.numel() * members, device=device)
    if kind == "all_reduce":
        return lambda: wires.all_reduce(full, axes).wait()
    if kind == "all_gather":
        return lambda: wires.all_gather(part, axes, 0, full.numel()).wait()
    if kind == "reduce_scatter":
        return lambda: wires.reduce_scatter(full, axes, "sum", 0).wait()
    # Each of n devices holds 1/n of the full tensor, divided into n pieces.
    rows = torch.ones(members, -(-part.numel() // members), device=device)
    return lambda: wires.all_to_all(rows, axes, 1, members * rows.shape[1], 1, 0, 1).wait()


def agree(*seconds: float) -> list[float]:
    """The largest values of any process, so that all processes repeat equally often. Waits for all processes."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(value) for value in values]


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _groups(processes: int) -> tuple[Collectives, dict[int, tuple[int, ...]]]:
    """Collectives among local processes, and for each size of group (pairs, and all processes) the axes it spans."""
    shape = halved(processes)
    wires = Collectives(mesh_groups(DeviceMesh("cpu", torch.arange(processes).reshape(shape))))
    return wires, {math.prod(shape[axis:]): tuple(range(axis, len(shape))) for axis in reversed(range(len(shape)))}


def halved(count: int) -> tuple[int, ...]:
    """A mesh of ``count`` processes. An even number above two becomes (its half, 2), so that pairs are measured too.

    >>> halved(8), halved(3)
    ((4, 2), (3,))
    """
    return (count // 2, 2) if count > 2 and count % 2 == 0 else (count,)


def rate_of_all(function: Callable[[], object], count: int, device: torch.device | None = None) -> float:
    """Seconds per call of ``count`` calls in a row, from when all processes start until the last one is done, including
    all work that was started on ``device``."""
    agree(0.0)
    start = time.perf_counter()
    for _ in range(count):
        function()
    if device is not None and device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    (taken,) = agree(time.perf_counter() - start)
    return taken / count


def measure_synchronisation(processes: int, seconds: float) -> float:
    """The seconds by which a small collective among all processes takes longer if they compute before it.

    Three loops take turns: computation, the collective, and both. The time of both beyond the sum of the two is the
    wait for the last process to arrive. If processes share cores, the same work takes each of them a different time.
    """
    wires, groups = _groups(processes)
    meet = collective_call("all_gather", processes, MESSAGE_BYTES[0], wires, groups[processes])
    square = torch.ones(SQUARE)
    (product,) = agree(mean_seconds(lambda: torch.mm(square, square), square.device, 0.1)[0])
    count = max(1, round(WORK_SECONDS / product))

    def compute() -> None:
        for _ in range(count):
            torch.mm(square, square)

    def both() -> None:
        compute()
        meet()

    pilot = rate_of_all(both, 2)
    waits = [
        rate_of_all(both, REPEATS) - rate_of_all(compute, REPEATS) - rate_of_all(meet, REPEATS)
        for _ in range(max(3, round(seconds / REPEATS / 2 / pilot)))
    ]
    return max(0.0, statistics.median(waits))


def measure_alone(rank: int, processes: int, seconds: float) -> float:
    """The factor by which this process computes faster while the others wait than while all compute."""
    square = torch.ones(SQUARE)
    budget = seconds / (processes + 1)

    def product() -> float:
        return mean_seconds(lambda: torch.mm(square, square), square.device, budget)[0]

    dist.barrier()
    together, alone = product(), math.inf
    for turn in range(processes):
        dist.barrier()
        if turn == rank:
            alone = product()
    dist.barrier()
    return together / alone


def measure_step(processes: int, seconds: float) -> StepSample:
    """Medians over repeats of work like a step."""
    wires, groups = _groups(processes)
    launches, rounds = list[float](), list[StepSample]()
    work, launching, update, axes = step_like(), step_like(launches), update_like(), groups[processes]

    def exchange(gradients: list[torch.Tensor]) -> None:
        dims, lengths = [0] * len(gradients), [len(gradient) for gradient in gradients]
        pieces = wires.reduce_scatter_bucket(gradients, axes, "sum", dims).wait()
        wires.all_gather_bucket(pieces, axes, dims, lengths).wait()

    def once() -> None:
        agree(0.0)
        start = time.perf_counter()
        gradients = work()
        worked = time.perf_counter() - start
        exchanged = rate_of_all(lambda: exchange(gradients), 1)
        updated = _timed(update)
        launches.clear()
        launching()
        step, updating = agree(worked, updated)
        rounds.append(StepSample(step, exchanged, updating, worked, updated, statistics.median(launches)))

    pilot = rate_of_all(once, 1)
    rounds.clear()  # The optimizer's state was made in it.
    for _ in range(max(2, round(seconds / pilot))):
        once()
    figures = zip(*map(dataclasses.astuple, rounds), strict=True)
    return StepSample(*map(statistics.median, figures))


def measure_collectives(processes: int, seconds: float) -> tuple[CollectiveSample, ...]:
    """Measures every kind of collective at every message size, among all processes and in pairs, with all groups at
    work at once."""
    started, samples = time.perf_counter(), list[CollectiveSample]()
    wires, groups = _groups(processes)
    jobs = [(size, kind, nbytes) for size in groups for kind in COLLECTIVES for nbytes in MESSAGE_BYTES]
    too_slow: set[tuple[int, str]] = set()
    for index, (size, kind, nbytes) in enumerate(jobs):
        if (size, kind) in too_slow:
            continue
        function = collective_call(kind, size, nbytes, wires, groups[size])
        function()
        pilot, elapsed = agree(_timed(function), time.perf_counter() - started)
        budget = max(0.0, seconds - elapsed) / (len(jobs) - index)
        # Chosen: the median of 200 calls is steady.
        repeats = min(200, max(2, math.ceil(budget / pilot)))
        times = [_timed(function) for _ in range(repeats)]
        samples.append(CollectiveSample(kind, size, nbytes, statistics.median(times)))
        if pilot > 2.0 + 4.0 * budget:  # a slow link: larger messages would take too long
            too_slow.add((size, kind))
    return tuple(samples)


def measure_process(folder: str, rank: int, processes: int, seconds: float) -> None:
    """The main function of a process started by :func:`autopar.calibration.machine.calibrate`: measures, and writes
    ``folder/<rank>.json``."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = f"file://{Path(folder).absolute()}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    try:
        measured = measure_rounds(rank, processes, seconds)
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(measured.to_json())


def measure_rounds(rank: int, processes: int, seconds: float) -> Samples:
    """What process ``rank`` of the default group measures in about ``seconds``; all processes call this at once."""
    return undisturbed([_measure_once(rank, processes, seconds / ROUNDS) for _ in range(ROUNDS)])


def _measure_once(rank: int, processes: int, seconds: float) -> Samples:
    # Shares of the time. Chosen by the number of figures that each measures.
    device = measure_device(torch.device("cpu"), 0.25 * seconds, dist.barrier)
    collectives = measure_collectives(processes, 0.3 * seconds)
    synchronisation = measure_synchronisation(processes, 0.15 * seconds)
    alone = measure_alone(rank, processes, 0.05 * seconds)
    step = measure_step(processes, 0.25 * seconds)
    return Samples(device, collectives, synchronisation, alone, **dataclasses.asdict(step))
