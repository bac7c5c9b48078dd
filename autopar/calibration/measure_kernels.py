"""Measures the kernels of one GPU, and how fast the processor launches them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from autopar.ops.attention_kernels import EFFICIENT, FLASH, kernel_for

from .measure_device import DeviceSamples, Job, Pool, attention_jobs, attention_samples, plain_samples, product_jobs
from .replayed import launching_seconds, replayed_seconds

# Few and many tiles, short and long inner dims, also many tiles with short inner dims, as layers of a width of a
# thousand have them: without these the fit made such products of an H200 a quarter too slow.
GPU_MATRICES = (
    *((size, size, size) for size in (512, 1024, 2048, 4096, 8192)),
    *((2048, 2048, k) for k in (256, 1024, 8192)),
    *((8192, n, 4096) for n in (256, 1024, 1536)),
    *((8192, n, 1024) for n in (1024, 2816, 4096, 8192)),
    *((1024, 1024, 8192), (32768, 1024, 1024), (16384, 512, 512), (1024, 4096, 1024)),
)
# Chosen: 4, 64 and 512 MiB of float32, so that what a kernel takes to begin weighs differently in each.
GPU_ELEMENTS = (1 << 20, 1 << 24, 1 << 27)
# (length, width) of causal attention in bfloat16, and tokens of all heads.
# Chosen: rows as models have them, and as many heads as occupy all of a GPU.
GPU_ATTENTION, GPU_TOKENS = ((1024, 64), (128, 64), (4096, 64), (1024, 128), (4096, 128)), 1 << 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure_kernels(device: torch.device, seconds: float, meet: Job = lambda: None) -> DeviceSamples:
    """Measures one GPU for about ``seconds``. ``meet`` is called before each figure, so that all GPUs are at work.
    ``launch`` is what the smallest kernel takes on the GPU, ``host`` what the processor takes to launch it."""
    products = [(shape, dtype) for dtype in _DTYPES for shape in GPU_MATRICES]
    pool, small, add = Pool(device), torch.ones(8, device=device), torch.ops.aten.add.Tensor
    smallest: Job = lambda: add(small, small)  # noqa: E731
    jobs: list[Job | None] = [smallest, *product_jobs(pool, products)]
    jobs += [pool.job(add, torch.float32, (count,), (count,)) for count in GPU_ELEMENTS]
    jobs += _attention(pool, device)
    stream, times = torch.cuda.Stream(device), []
    with full_precision():
        for job in jobs:
            meet()
            times.append(0.0 if job is None else replayed_seconds(job, stream, seconds / len(jobs)))
    torch.cuda.empty_cache()
    launch, *others = times
    *attended, masked = others[len(products) + len(GPU_ELEMENTS) :]
    return replace(
        plain_samples(launch, products, GPU_ELEMENTS, others),
        attention=attention_samples(GPU_ATTENTION, heads_of, "bf16", attended) if masked else (),
        masked=masked,
        host=launching_seconds(smallest, device),
    )


def heads_of(length: int) -> int:
    """Heads of measured attention."""
    return GPU_TOKENS // length


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 without TF32, whatever the process has asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _attention(pool: Pool, device: torch.device) -> list[Job | None]:
    """Causal attention, then the first under a mask. None for GPUs that have no such kernel, in their places: all
    GPUs of a job meet as often."""
    query = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    if kernel_for(query, query, query, None, True) is not FLASH:
        return [None] * (2 * len(GPU_ATTENTION) + 1)
    shapes = [(1, heads_of(length), length, width) for length, width in GPU_ATTENTION]
    causal = [job for shape in shapes for job in attention_jobs(pool, FLASH, torch.bfloat16, shape)]
    return [*causal, _masked(pool, shapes[0])]


def _masked(pool: Pool, shape: tuple[int, int, int, int]) -> Job:
    turns, scale = pool.turns(torch.bfloat16, *(3 * [shape])), shape[-1] ** -0.5
    mask = torch.zeros(1, 1, shape[2], shape[2], dtype=torch.bfloat16, device=pool.numbers.device)

    def forward() -> object:
        query, key, value = next(turns)
        return EFFICIENT.forward(query, key, value, mask, False, scale)

    return forward
