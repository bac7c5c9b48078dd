"""What one process measures of its device and of the links to the others, all of them working at once.

Run by :mod:`autopar.calibrate` in processes of its own; results are plain numbers in JSON, one file per rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.collectives import Collectives
from autopar.runtime.groups import mesh_groups

from .measure_step import step_like
from .program import COLLECTIVES

MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
# (m, n, k): square ones, and the skinny ones that sharding makes.
CPU_MATRICES = (
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (32, 512, 512),
    (512, 64, 512),
)
# Computing between two collectives while synchronisation is measured: a few layers, several time slices.
WORK_SECONDS = 0.03
SYNCHRONISATION_ROUNDS = 5
# Few and many tiles, short and long inner dims.
GPU_MATRICES = (
    *((size, size, size) for size in (512, 1024, 2048, 4096, 8192)),
    *((2048, 2048, k) for k in (256, 1024, 8192)),
    *((8192, n, 4096) for n in (256, 1024, 1536)),
)
CPU_ELEMENTS = (1 << 14, 1 << 17, 1 << 20)
# More than the caches of the processors that a few processes share.
POOL_BYTES = 128 << 20
GPU_ELEMENTS = (1 << 20, 1 << 24, 1 << 27)


_FIGURES = ("synchronisation", "alone", "step", "launch", "exchange")


@dataclass(frozen=True)
class CollectiveSample:
    """One collective among ``members`` processes took ``seconds``; ``nbytes`` is the full tensor, as in
    :mod:`autopar.cost.collective`."""

    kind: str
    members: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class MatrixSample:
    """One product [m, k] @ [k, n] took ``seconds``."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class DeviceSamples:
    """Seconds of one small operation, one view, matrix products, and elementwise operations moving so many
    bytes."""

    launch: float
    view: float
    matrices: tuple[MatrixSample, ...]
    pointwise: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Samples:
    """All one rank measured; ``synchronisation`` is by how many seconds a collective takes longer after computing
    than after another collective, ``alone`` how many times as fast as with all at work it computes while the others
    wait. ``step``, ``launch``, ``exchange``: see :func:`measure_step`."""

    device: DeviceSamples
    collectives: tuple[CollectiveSample, ...]
    synchronisation: float = 0.0
    alone: float = 1.0
    step: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Samples:
        table = json.loads(text)
        device = table["device"]
        matrices = tuple(MatrixSample(**sample) for sample in device.pop("matrices"))
        pointwise = tuple((int(nbytes), float(seconds)) for nbytes, seconds in device.pop("pointwise"))
        collectives = tuple(CollectiveSample(**sample) for sample in table["collectives"])
        found = DeviceSamples(matrices=matrices, pointwise=pointwise, **device)
        return Samples(found, collectives, *(float(table[name]) for name in _FIGURES))


def mean_seconds(function: Callable[[], object], device: torch.device, budget: float) -> float:
    """Mean time of ``function`` called back to back for about ``budget`` seconds.

    The mean, not the median: processes that share a core are suspended for whole time slices, and what counts
    is the rate each gets.
    """

    def run(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    run(2)
    count, spent, calls = 1, 0.0, 0
    while spent < budget:
        taken = run(count)
        spent, calls = spent + taken, calls + count
        count = max(1, min(2 * count, int((budget - spent) / max(taken / count, 1e-9))))
    return spent / calls


def _matrix_sample(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, budget: float
) -> MatrixSample:
    m, n, k = shape
    left, right = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    return MatrixSample(name, m, n, k, mean_seconds(lambda: torch.mm(left, right), device, budget))


def _cold_addition(count: int, device: torch.device) -> Callable[[], object]:
    """A sum of two tensors of ``count`` elements that are, like its result, others each time: a step touches so much
    memory between two uses of a tensor that no cache holds it."""
    length = max(1, POOL_BYTES // (12 * count))
    operands = [torch.ones(2, count, device=device).unbind() for _ in range(length)]
    results = [torch.empty(0, device=device)] * length
    turns = itertools.cycle(range(length))

    def add() -> None:
        turn = next(turns)
        results[turn] = torch.add(*operands[turn])

    return add


def measure_device(device: torch.device, seconds: float, meet: Callable[[], object] = lambda: None) -> DeviceSamples:
    """Measures one device for about ``seconds``; ``meet`` is called before each figure, for all processes to
    be at work."""
    on_gpu = device.type == "cuda"
    shapes, elements = (GPU_MATRICES, GPU_ELEMENTS) if on_gpu else (CPU_MATRICES, CPU_ELEMENTS)
    # The low-precision rate of a processor without matrix units is far below, so one product tells enough.
    jobs = [(shape, torch.float32) for shape in shapes]
    for dtype in (torch.bfloat16, torch.float16) if on_gpu else (torch.bfloat16,):
        jobs += [(shape, dtype) for shape in (shapes if on_gpu else shapes[2:3])]
    budget = seconds / (len(jobs) + len(elements) + 2)
    matrices = []
    for shape, dtype in jobs:
        meet()
        matrices.append(_matrix_sample(shape, dtype, device, budget))
    pointwise = []
    for count in elements:
        add = _cold_addition(count, device)
        meet()
        pointwise.append((12 * count, mean_seconds(add, device, budget)))
    small = torch.ones(8, device=device)
    meet()
    # As a step calls them.
    add, view = torch.ops.aten.add.Tensor, torch.ops.aten.view.default
    launch = mean_seconds(lambda: add(small, small), device, budget)
    meet()
    viewing = mean_seconds(lambda: view(small, [2, 4]), device, budget)
    return DeviceSamples(launch, viewing, tuple(matrices), tuple(pointwise))


def collective_call(
    kind: str, members: int, nbytes: int, wires: Collectives, axes: tuple[int, ...]
) -> Callable[[], object]:
    """A collective, as plans run it, whose full tensor has about ``nbytes`` bytes."""
    device = wires.groups.device
    part = torch.ones(max(1, nbytes // 4 // members), device=device)
    full = torch.ones(part.numel() * members, device=device)
    if kind == "all_reduce":
        return lambda: wires.all_reduce(full, axes).wait()
    if kind == "all_gather":
        return lambda: wires.all_gather(part, axes, 0, full.numel()).wait()
    if kind == "reduce_scatter":
        return lambda: wires.reduce_scatter(full, axes, "sum", 0).wait()
    # Each of n devices holds 1/n of what counts as the full tensor, itself in n pieces.
    rows = torch.ones(members, -(-part.numel() // members), device=device)
    return lambda: wires.all_to_all(rows, axes, 1, members * rows.shape[1], 1, 0, 1).wait()


def agree(*seconds: float) -> list[float]:
    """The largest values of any process, so that all repeat equally often. Waits for all."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(value) for value in values]


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _groups(processes: int) -> tuple[Collectives, dict[int, tuple[int, ...]]]:
    """Collectives among local processes, and for each size of group (pairs and all) the axes it spans."""
    shape = (processes // 2, 2) if processes % 2 == 0 and processes > 2 else (processes,)
    wires = Collectives(mesh_groups(DeviceMesh("cpu", torch.arange(processes).reshape(shape))))
    return wires, {math.prod(shape[axis:]): tuple(range(axis, len(shape))) for axis in reversed(range(len(shape)))}


def _rate_of_all(function: Callable[[], object], count: int) -> float:
    """Seconds per call of ``count`` in a row, from when all processes start to when the last is done."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        function()
    dist.barrier()
    return (time.perf_counter() - start) / count


def measure_synchronisation(processes: int, seconds: float) -> float:
    """By how many seconds a small collective among all processes takes longer when they come to it from computing.

    Three loops take turns: computing, the collective, and both. What both take beyond the sum of the two is waiting
    for the last to arrive. The same piece of work takes every process another time where cores are shared.
    """
    wires, groups = _groups(processes)
    meet = collective_call("all_gather", processes, MESSAGE_BYTES[0], wires, groups[processes])
    square = torch.ones(CPU_MATRICES[2][:2])
    (product,) = agree(mean_seconds(lambda: torch.mm(square, square), square.device, 0.1))
    count = max(1, round(WORK_SECONDS / product))

    def compute() -> None:
        for _ in range(count):
            torch.mm(square, square)

    def both() -> None:
        compute()
        meet()

    (pilot,) = agree(_rate_of_all(both, 2))
    repeats = max(2, round(seconds / SYNCHRONISATION_ROUNDS / 2 / pilot))
    waits = [
        _rate_of_all(both, repeats) - _rate_of_all(compute, repeats) - _rate_of_all(meet, repeats)
        for _ in range(SYNCHRONISATION_ROUNDS)
    ]
    return max(0.0, statistics.median(waits))


def measure_alone(rank: int, processes: int, seconds: float) -> float:
    """How many times as fast this process computes while the others wait as while all do."""
    square = torch.ones(CPU_MATRICES[2][:2])
    budget = seconds / (processes + 1)

    def product() -> float:
        return mean_seconds(lambda: torch.mm(square, square), square.device, budget)

    dist.barrier()
    together, alone = product(), math.inf
    for turn in range(processes):
        dist.barrier()
        if turn == rank:
            alone = product()
    dist.barrier()
    return together / alone


def measure_step(processes: int, seconds: float) -> tuple[float, float, float]:
    """Until the last process has done it: seconds of a piece of work like a step, and of exchanging its gradients; and
    of a tiny operation in it, as long as this process is not suspended. Medians over repeats."""
    wires, groups = _groups(processes)
    launches: list[float] = []
    work, axes = step_like(), groups[processes]

    def exchanging() -> None:
        gradients = work()
        dims, lengths = [0] * len(gradients), [len(gradient) for gradient in gradients]
        pieces = wires.reduce_scatter_bucket(gradients, axes, "sum", dims).wait()
        wires.all_gather_bucket(pieces, axes, dims, lengths).wait()

    (pilot,) = agree(_rate_of_all(exchanging, 1))
    jobs = (work, step_like(launches), exchanging)
    rounds = [[_rate_of_all(job, 1) for job in jobs] for _ in range(max(3, round(seconds / pilot / 3)))]
    plain, _, whole = (statistics.median(times) for times in zip(*rounds, strict=True))
    return plain, statistics.median(launches), max(0.0, whole - plain)


def measure_collectives(processes: int, seconds: float) -> tuple[CollectiveSample, ...]:
    """Every kind at every message size, among all processes and in pairs, every group busy at once."""
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
        repeats = min(200, max(2, math.ceil(budget / pilot)))
        times = [_timed(function) for _ in range(repeats)]
        samples.append(CollectiveSample(kind, size, nbytes, statistics.median(times)))
        if pilot > 2.0 + 4.0 * budget:  # a slow link: larger messages would take too long
            too_slow.add((size, kind))
    return tuple(samples)


def measure_process(folder: str, rank: int, processes: int, seconds: float) -> None:
    """What a process started by :func:`autopar.calibrate.calibrate` does: measures, and writes
    ``folder/<rank>.json``."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = f"file://{Path(folder).absolute()}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    try:
        device = measure_device(torch.device("cpu"), 0.25 * seconds, dist.barrier)
        collectives = measure_collectives(processes, 0.45 * seconds)
        synchronisation = measure_synchronisation(processes, 0.1 * seconds)
        alone = measure_alone(rank, processes, 0.05 * seconds)
        step = measure_step(processes, 0.15 * seconds)
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(Samples(device, collectives, synchronisation, alone, *step).to_json())
