"""Seconds of matrix products and fused attention whose operands arrive at full speed: efficiency by shape.

A library computes a product in tiles of the result, which are assigned to the device's multiprocessors in waves. The
last wave may leave most of them idle. With T(a, b) tiles of a x b on P processors, and device constants d
(``tile_depth``) and c (``tile_border``),

    seconds = min over tiles a x b of  ceil(T / P) · 2 a b (k + d) · (1 + c/a + c/b) / (rate / P)

d is the time in which a tile fills its pipeline and writes its result, as the bytes of an additional inner dim. c is
the cost of fetching relative to multiplying: a tile reads a + b rows of its operands and uses them a b times. The
library tries tiles of many shapes; those of :data:`TILES` suffice to model its steps.

Where tiles are few and the inner dim is deep, libraries divide that among s processors a tile (split-k: CUTLASS,
*Efficient GEMM in CUDA*, "Parallelized Reductions"; in uneven parts, stream-k: Osama et al. 2023). Each part writes its
sums of 4 bytes, and a second kernel reads and adds them. With W the bandwidth of the memory,

    seconds = min over tiles, 1 <= s <= floor(P / T) of  2 a b (k/s + d) · (1 + c/a + c/b) / (rate / P)
                                                      + s · 8 bytes · batch m n / W  +  launch / 2

counts if it is less. Every processor has one part, so s is at most P / T; where no tile leaves half of the processors
idle nothing is divided. The best s balances k/s and s, hence a square root.

A smaller product never costs more, and neither do fewer products: every term grows with m, n, k and their number,
whatever the tile and s, and a smaller product has the same choices or more. None is quicker than the rate allows, as
a tile's parts are on processors of their own.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autopar.cluster.device import Device

# Chosen: common tiles of cuBLAS and CUTLASS; the device's constants were fitted with these.
TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SUM_BYTES = 4  # of a partial sum, at least: libraries add up in f32
# The share of a launch that a second kernel takes, which is started while the first one runs. Chosen near the least
# error of published products of few tiles (docs/cost-model.md, "Computing").
SECOND_KERNEL = 0.5


def product_seconds(
    device: Device, rate: float, batch: float, matrix: tuple[float, float, float], itemsize: int = 2
) -> float:
    """Seconds of ``batch`` products of [m, k] and [k, n] (``matrix`` is m, n, k) on a device of at most ``rate``
    FLOP/s, with elements of ``itemsize`` bytes."""
    m, n, k = matrix
    if not device.processors:
        h = device.matmul_padding
        return 2.0 * batch * (m + h) * (n + h) * (k + h) / rate
    processors, depth, ceil = device.processors, device.tile_depth / itemsize, math.ceil
    tiles = [(batch * ceil(m / a) * ceil(n / b), area) for a, b, area in _areas(device.tile_border)]
    waves = min([ceil(count / processors) * area for count, area in tiles])
    whole = waves * 2.0 * (k + depth) * processors / rate
    second = SECOND_KERNEL * device.launch_seconds
    # Nothing is divided if the fewest tiles, the largest, occupy most processors, or if the rate leaves less to gain.
    if 2.0 * tiles[0][0] > processors or whole - 2.0 * batch * m * n * k / rate <= second:
        return whole
    sums = 2.0 * max(itemsize, SUM_BYTES) * batch * m * n / device.memory_bandwidth
    divided = [
        _divided_seconds(area * 2.0 * processors / rate, processors // count, k, depth, sums)
        for count, area in tiles
        if 2.0 * count <= processors
    ]
    return min(whole, second + min(divided))


def _divided_seconds(deep: float, most: float, k: float, depth: float, sums: float) -> float:
    """The least seconds of a product whose inner dim ``k`` is divided in up to ``most`` parts of each tile, but for the
    second kernel's start. A part takes ``deep`` seconds for each of its inner dim and of ``depth``; for each part of
    the tiles the writing and reading of sums takes ``sums`` seconds."""
    parts = min(most, max(1.0, math.sqrt(deep * k / sums)))
    return deep * (k / parts + depth) + sums * parts


@lru_cache
def _areas(border: float) -> tuple[tuple[int, int, float], ...]:
    """Sides of the tiles, and the elements of the result that take as long as one tile if fetching were free."""
    return tuple((a, b, a * b * (1.0 + border / a + border / b)) for a, b in TILES)


def attention_seconds(device: Device, rate: float, flops: float, width: float, keys: float) -> float:
    """Seconds of fused attention of ``flops`` with heads of ``width``, whose queries see up to ``keys`` keys. Narrow
    heads use less of a device's matrix units, which wait for softmax between two products; short rows too, since blocks
    of queries begin and end, and those on the diagonal of a causal mask are computed whole."""
    slower = (1.0 + device.attention_width / width) * (1.0 + device.attention_length / keys)
    return flops * slower / (rate * device.attention_efficiency)
