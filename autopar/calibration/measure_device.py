"""Measures the device of one process."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.ops.attention_kernels import FLASH, PROCESSOR, kernel_for

from .replayed import launching_seconds, replayed_seconds

# (m, n, k): square products, and skinny ones like the products of a layer after sharding and microbatching.
CPU_MATRICES = (
    (64, 64, 64),
    (256, 256, 256),
    (512, 512, 512),
    (16, 1024, 256),
    (64, 1024, 256),
    (64, 256, 1024),
    (1024, 256, 64),
    (256, 1024, 256),
    (512, 64, 512),
)
# Few and many tiles, short and long inner dims.
GPU_MATRICES = (
    *((size, size, size) for size in (512, 1024, 2048, 4096, 8192)),
    *((2048, 2048, k) for k in (256, 1024, 8192)),
    *((8192, n, 4096) for n in (256, 1024, 1536)),
)
# Chosen: 64 KiB, 512 KiB and 4 MiB of float32, so that a launch weighs differently in each.
CPU_ELEMENTS = (1 << 14, 1 << 17, 1 << 20)
# Chosen: 4, 64 and 512 MiB of float32, so that a launch weighs differently in each.
GPU_ELEMENTS = (1 << 20, 1 << 24, 1 << 27)
# The low-precision rate of a processor without matrix units is far lower, so one product is enough.
# Chosen: one of CPU_MATRICES, for comparison.
CPU_LOW_PRECISION = (256, 256, 256)
# Larger than the caches of the processors that a few processes share.
# Chosen: last-level caches of servers hold some tens of MB.
POOL_BYTES = 128 << 20

# (length, width) of causal attention with HEADS heads.
# Chosen: short and long rows, narrow and wide heads, small enough for a core.
CPU_ATTENTION, HEADS = ((64, 64), (256, 64), (256, 32), (256, 128)), 4
# The same of GPUs. Chosen: rows as models have them, which occupy all of a GPU.
GPU_ATTENTION, GPU_HEADS = ((1024, 64), (4096, 64), (1024, 128), (4096, 128)), 64
# Chosen: 256 KiB of float32, which take much longer than a launch and stay in a cache near the core.
FUNCTION_ELEMENTS = 1 << 16
# Parameters of layers, so many that they, their gradients and their state are larger than caches, as a model's are.
# Chosen: 32 MiB in all.
UPDATED = 32 * ((256, 1024), (1024,))

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
Job = Callable[[], object]


@dataclass(frozen=True)
class MatrixSample:
    """One product [m, k] @ [k, n] took ``seconds``."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class AttentionSample:
    """Causal attention of so many ``heads``, or its backward, took ``seconds``."""

    length: int
    width: int
    backward: bool
    seconds: float
    heads: int = HEADS
    dtype: str = "f32"


@dataclass(frozen=True)
class DeviceSamples:
    """Seconds of one small operation, one view, matrix products, and elementwise operations with their bytes; if
    measured, also of causal attention, of ``tanh`` and ``exp`` of :data:`FUNCTION_ELEMENTS` elements (their average),
    and of an AdamW update of :data:`UPDATED`. ``share``: wall-clock seconds per second of processor time while all
    processes are at work. ``host``: of a GPU, seconds in which the processor launches an operation."""

    launch: float
    view: float
    matrices: tuple[MatrixSample, ...]
    pointwise: tuple[tuple[int, float], ...]
    attention: tuple[AttentionSample, ...] = ()
    function: float = 0.0
    update: float = 0.0
    share: float = 1.0
    host: float = 0.0


def mean_seconds(function: Job, device: torch.device, budget: float) -> tuple[float, float]:
    """Mean seconds of ``function``, called back to back for about ``budget`` seconds: wall-clock time and processor
    time (on a GPU, wall-clock time twice).

    The mean is taken, not the median, because processes that share a core are suspended for whole time slices, and the
    rate that each gets is what counts.
    """
    if device.type == "cuda":
        seconds, _ = _mean(function, budget, lambda: _settled(device))
        return seconds, seconds
    wall, worked = _mean(function, budget, time.perf_counter)
    return wall, worked / torch.get_num_threads()


def _settled(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _mean(function: Job, budget: float, now: Callable[[], float]) -> tuple[float, float]:
    """Seconds per call by the clock ``now``, and in processor time of this process."""
    for _ in range(2):
        function()
    count, spent, worked, calls = 1, 0.0, 0.0, 0
    while spent < budget:
        start, began = now(), time.process_time()
        for _ in range(count):
            function()
        taken = now() - start
        spent, worked, calls = spent + taken, worked + time.process_time() - began, calls + count
        count = max(1, min(2 * count, int((budget - spent) / max(taken / count, 1e-9))))
    return spent / calls, worked / calls


def _each(jobs: Sequence[Job], device: torch.device, seconds: float, meet: Job) -> tuple[list[float], float]:
    """Seconds of each of ``jobs``, called back to back, and the ratio of wall-clock time to processor time.

    The seconds are processor time, multiplied by that ratio, which is the same for all jobs: the lower quartile over
    all of them. So other load that ran during a single measurement does not disturb its figure.
    """
    times = []
    for job in jobs:
        meet()
        times.append(_seconds_of(job, device, seconds / len(jobs)))
    share = lower_quartile([wall / worked for wall, worked in times])
    return [worked * share for _, worked in times], share


def _seconds_of(job: Job, device: torch.device, budget: float) -> tuple[float, float]:
    if device.type != "cuda":
        return mean_seconds(job, device, budget)
    seconds = replayed_seconds(job, device, budget)
    return seconds, seconds


def lower_quartile(values: Sequence[float]) -> float:
    """The lower quartile of ``values``.

    >>> lower_quartile([4.0, 1.0, 2.0, 3.0, 90.0])
    2.0
    """
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


class Pool:
    """Memory that is larger than the caches, from which operations take different operands each time. The same happens
    in a step, which touches much memory between two uses of a tensor."""

    def __init__(self, device: torch.device) -> None:
        self.ones = torch.ones(POOL_BYTES // 4, device=device)

    def turns(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Iterator[list[torch.Tensor]]:
        """Yields tensors of ``shapes`` endlessly. Memory is reused only after the whole pool has been used."""
        sizes, flat = [math.prod(shape) for shape in shapes], self.ones.view(dtype)
        need = sum(sizes)
        if need > len(flat):
            flat = torch.ones(need, dtype=dtype, device=flat.device)
        places = [flat.narrow(0, turn * need, need).split(sizes) for turn in range(len(flat) // need)]
        return itertools.cycle(
            [[piece.view(shape) for piece, shape in zip(place, shapes, strict=True)] for place in places]
        )

    def job(self, operation: Callable[..., torch.Tensor], dtype: torch.dtype, *shapes: tuple[int, ...]) -> Job:
        """A job that runs ``operation`` on operands of ``shapes``."""
        turns = self.turns(dtype, *shapes)
        return lambda: operation(*next(turns))


def _attention_jobs(pool: Pool, length: int, width: int) -> list[Job]:
    """Jobs for causal attention and its backward, on processors in float32 and on GPUs in bfloat16."""
    on_gpu = pool.ones.device.type == "cuda"
    kernel, kind = (FLASH, torch.bfloat16) if on_gpu else (PROCESSOR, torch.float32)
    shape, scale = (1, GPU_HEADS if on_gpu else HEADS, length, width), width**-0.5
    inputs, backward_inputs = pool.turns(kind, *(3 * [shape])), pool.turns(kind, *(4 * [shape]))
    saved = kernel.forward(*next(inputs), None, True, scale)
    return [
        lambda: kernel.forward(*next(inputs), None, True, scale),
        lambda: kernel.backward(*next(backward_inputs), *saved, None, True, scale),
    ]


def _attention_of_gpu(pool: Pool) -> list[Job]:
    """None for GPUs that have no such kernel."""
    query = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=pool.ones.device)
    if kernel_for(query, query, query, None, True) is not FLASH:
        return []
    return [job for length, width in GPU_ATTENTION for job in _attention_jobs(pool, length, width)]


def _updating() -> Job:
    """A job that runs an AdamW update with torch's default implementation."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in UPDATED]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(parameters, lr=1e-6).step


def _processor_jobs(pool: Pool) -> list[Job]:
    """The jobs that are only measured on processors: attention, functions and updates."""
    jobs = [job for length, width in CPU_ATTENTION for job in _attention_jobs(pool, length, width)]
    jobs += [pool.job(function, torch.float32, (FUNCTION_ELEMENTS,)) for function in (torch.tanh, torch.exp)]
    return [*jobs, _updating()]


def _with_processor(samples: DeviceSamples, times: Sequence[float]) -> DeviceSamples:
    """``samples`` with the ``times`` of :func:`_processor_jobs`."""
    attention = _attention_samples(CPU_ATTENTION, HEADS, "f32", times)
    *_, tanh, exp, update = times
    return replace(samples, attention=attention, function=(tanh + exp) / 2, update=update)


def _attention_samples(
    sizes: Sequence[tuple[int, int]], heads: int, dtype: str, times: Sequence[float]
) -> tuple[AttentionSample, ...]:
    """The first of ``times``, which are those of forward and backward in turn."""
    kinds = [(length, width, backward) for length, width in sizes for backward in (False, True)]
    return tuple(AttentionSample(*kind, taken, heads, dtype) for kind, taken in zip(kinds, times, strict=False))


def measure_device(device: torch.device, seconds: float, meet: Job = lambda: None) -> DeviceSamples:
    """Measures one device for about ``seconds``. ``meet`` is called before each figure, so that all processes are at
    work."""
    on_gpu = device.type == "cuda"
    shapes, elements = (GPU_MATRICES, GPU_ELEMENTS) if on_gpu else (CPU_MATRICES, CPU_ELEMENTS)
    products = [(shape, torch.float32) for shape in shapes]
    for dtype in (torch.bfloat16, torch.float16) if on_gpu else (torch.bfloat16,):
        products += [(shape, dtype) for shape in (shapes if on_gpu else (CPU_LOW_PRECISION,))]
    pool, small = Pool(device), torch.ones(8, device=device)
    # Called as a step calls them.
    add, view = torch.ops.aten.add.Tensor, torch.ops.aten.view.default
    jobs: list[Job] = [lambda: add(small, small)]
    jobs += [lambda: add(small, small) if on_gpu else view(small, [2, 4])]
    jobs += [pool.job(torch.mm, dtype, (m, k), (k, n)) for (m, n, k), dtype in products]
    jobs += [pool.job(add, torch.float32, (count,), (count,)) for count in elements]
    others = _attention_of_gpu(pool) if on_gpu else _processor_jobs(pool)
    (launch, viewing, *times), share = _each([*jobs, *others], device, seconds, meet)
    multiplied, added = times[: len(products)], times[len(products) : len(products) + len(elements)]
    samples = DeviceSamples(
        launch,
        viewing,
        tuple(MatrixSample(_SHORT[dtype], *shape, t) for (shape, dtype), t in zip(products, multiplied, strict=True)),
        tuple(zip((12 * count for count in elements), added, strict=True)),
        share=share,
    )
    later = times[len(products) + len(elements) :]
    if not on_gpu:
        return _with_processor(samples, later)
    attention = _attention_samples(GPU_ATTENTION, GPU_HEADS, "bf16", later)
    return replace(samples, view=0.0, attention=attention, host=launching_seconds(jobs[0], device))
