"""Measures the processor of one process (GPUs: :mod:`.measure_kernels`)."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.ops.attention_kernels import PROCESSOR, Kernel

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
# Chosen: 64 KiB, 512 KiB and 4 MiB of float32, so that a launch weighs differently in each.
CPU_ELEMENTS = (1 << 14, 1 << 17, 1 << 20)
# The low-precision rate of a processor without matrix units is far lower, so one product is enough.
# Chosen: one of CPU_MATRICES, for comparison.
CPU_LOW_PRECISION = (256, 256, 256)
# Larger than the caches of the processors that a few processes share.
# Chosen: last-level caches of servers hold some tens of MB.
POOL_BYTES = 128 << 20

# (length, width) of causal attention with HEADS heads.
# Chosen: short and long rows, narrow and wide heads, small enough for a core.
CPU_ATTENTION, HEADS = ((64, 64), (256, 64), (256, 32), (256, 128)), 4
# Chosen: 256 KiB of float32, which take much longer than a launch and stay in a cache near the core.
FUNCTION_ELEMENTS = 1 << 16

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
Job = Callable[[], object]
Matrix = tuple[int, int, int]


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
    measured, also of causal attention, and of ``tanh`` and ``exp`` of :data:`FUNCTION_ELEMENTS` elements (their
    average). ``share``: wall-clock seconds per second of processor time while all processes are at work. ``host``: of a
    GPU, seconds in which the processor launches an operation; ``masked``: of the first forward in ``attention`` under a
    mask, without being causal."""

    launch: float
    view: float
    matrices: tuple[MatrixSample, ...]
    pointwise: tuple[tuple[int, float], ...]
    attention: tuple[AttentionSample, ...] = ()
    function: float = 0.0
    share: float = 1.0
    host: float = 0.0
    masked: float = 0.0


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
        times.append(mean_seconds(job, device, seconds / len(jobs)))
    share = lower_quartile([wall / worked for wall, worked in times])
    return [worked * share for _, worked in times], share


def lower_quartile(values: Sequence[float]) -> float:
    """The lower quartile of ``values``.

    >>> lower_quartile([4.0, 1.0, 2.0, 3.0, 90.0])
    2.0
    """
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


class Pool:
    """Memory that is larger than the caches, from which operations take different operands each time. The same happens
    in a step, which touches much memory between two uses of a tensor. The numbers are random: with others a processor
    draws less power, and runs faster than in a step."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)  # Not the user's.
        self.numbers = torch.rand(POOL_BYTES // 4, device=device, generator=generator)
        self._as: dict[torch.dtype, torch.Tensor] = {}

    def turns(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Iterator[list[torch.Tensor]]:
        """Yields tensors of ``shapes`` endlessly. Memory is reused only after the whole pool has been used."""
        sizes, flat = [math.prod(shape) for shape in shapes], self._in(dtype)
        need = sum(sizes)
        if need > len(flat):
            flat = flat.repeat(math.ceil(need / len(flat)))
        places = [flat.narrow(0, turn * need, need).split(sizes) for turn in range(len(flat) // need)]
        return itertools.cycle(
            [[piece.view(shape) for piece, shape in zip(place, shapes, strict=True)] for place in places]
        )

    def _in(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers as ``dtype``, as many bytes."""
        if dtype not in self._as:
            count = self.numbers.element_size() // dtype.itemsize
            self._as[dtype] = self.numbers.to(dtype).repeat(count)
        return self._as[dtype]

    def job(self, operation: Callable[..., torch.Tensor], dtype: torch.dtype, *shapes: tuple[int, ...]) -> Job:
        """A job that runs ``operation`` on operands of ``shapes``."""
        turns = self.turns(dtype, *shapes)
        return lambda: operation(*next(turns))


def attention_jobs(pool: Pool, kernel: Kernel, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Job]:
    """Jobs for causal attention of ``shape`` [B, H, L, D] by ``kernel``, and its backward."""
    inputs, more, scale = pool.turns(dtype, *(3 * [shape])), pool.turns(dtype, *(4 * [shape])), shape[-1] ** -0.5
    saved = kernel.forward(*_three(inputs), None, True, scale)

    def backward() -> object:
        grad, query, key, value = next(more)
        return kernel.backward(grad, query, key, value, *saved, None, True, scale)

    return [lambda: kernel.forward(*_three(inputs), None, True, scale), backward]


def _three(turns: Iterator[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = next(turns)
    return first, second, third


def _processor_jobs(pool: Pool) -> list[Job]:
    """The jobs that are only measured on processors: attention and functions."""
    shapes = [(1, HEADS, length, width) for length, width in CPU_ATTENTION]
    jobs = [job for shape in shapes for job in attention_jobs(pool, PROCESSOR, torch.float32, shape)]
    return jobs + [pool.job(function, torch.float32, (FUNCTION_ELEMENTS,)) for function in (torch.tanh, torch.exp)]


def _with_processor(samples: DeviceSamples, times: Sequence[float]) -> DeviceSamples:
    """``samples`` with the ``times`` of :func:`_processor_jobs`."""
    attention = attention_samples(CPU_ATTENTION, lambda _: HEADS, "f32", times)
    *_, tanh, exp = times
    return replace(samples, attention=attention, function=(tanh + exp) / 2)


def attention_samples(
    sizes: Sequence[tuple[int, int]], heads: Callable[[int], int], dtype: str, times: Sequence[float]
) -> tuple[AttentionSample, ...]:
    """The first of ``times``, which are those of forward and backward in turn."""
    kinds = [(length, width, backward) for length, width in sizes for backward in (False, True)]
    return tuple(
        AttentionSample(*kind, taken, heads(kind[0]), dtype) for kind, taken in zip(kinds, times, strict=False)
    )


def measure_device(device: torch.device, seconds: float, meet: Job = lambda: None) -> DeviceSamples:
    """Measures a processor for about ``seconds``. ``meet`` is called before each figure, so that all processes are at
    work."""
    products = [(shape, torch.float32) for shape in CPU_MATRICES] + [(CPU_LOW_PRECISION, torch.bfloat16)]
    pool, small = Pool(device), torch.ones(8, device=device)
    # Called as a step calls them.
    add, view = torch.ops.aten.add.Tensor, torch.ops.aten.view.default
    jobs: list[Job] = [lambda: add(small, small), lambda: view(small, [2, 4])]
    jobs += product_jobs(pool, products)
    jobs += [pool.job(add, torch.float32, (count,), (count,)) for count in CPU_ELEMENTS]
    (launch, viewing, *times), share = _each([*jobs, *_processor_jobs(pool)], device, seconds, meet)
    others = times[len(products) + len(CPU_ELEMENTS) :]
    plain = plain_samples(launch, products, CPU_ELEMENTS, times)
    return _with_processor(replace(plain, view=viewing, share=share), others)


def product_jobs(pool: Pool, products: Sequence[tuple[Matrix, torch.dtype]]) -> list[Job]:
    return [pool.job(torch.mm, dtype, (m, k), (k, n)) for (m, n, k), dtype in products]


def plain_samples(
    launch: float, products: Sequence[tuple[Matrix, torch.dtype]], elements: Sequence[int], times: Sequence[float]
) -> DeviceSamples:
    """The first of ``times``: those of ``products``, then of additions of so many ``elements``."""
    matrices = (MatrixSample(_SHORT[dtype], *shape, t) for (shape, dtype), t in zip(products, times, strict=False))
    added = zip(elements, times[len(products) :], strict=False)
    return DeviceSamples(launch, 0.0, tuple(matrices), tuple((12 * count, taken) for count, taken in added))
