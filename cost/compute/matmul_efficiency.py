"""Seconds of matrix products and fused attention whose operands arrive at full speed: efficiency by shape.

A library computes a product in tiles of the result, which are assigned to the device's multiprocessors in waves. The
last wave may leave most of them idle. With T(a, b) tiles of a x b on P processors, and device constants d
(``tile_depth``) and c (``tile_border``),

    seconds = min over tiles a x b of  ceil(T / P) · 2 a b (k + d) · (1 + c/a + c/b) / (rate / P)

d is the time in which a tile fills its pipeline and writes its result, as the bytes of an additional inner dim. c is
the cost of fetching relative to multiplying: a tile reads a + b rows of its operands and uses them a b times. The
library tries tiles of many shapes; those of :data:`TILES` suffice to model its steps. A smaller product never costs
more, and neither do fewer products, since every term grows with m, n, k and their number.
"""

from __future__ import annotations

import math

from autopar.cluster.device import Device

# Chosen: common tiles of cuBLAS and CUTLASS; the device's constants were fitted with these.
TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


def product_seconds(
    device: Device, rate: float, batch: float, matrix: tuple[float, float, float], itemsize: int = 2
) -> float:
    """Seconds of ``batch`` products of [m, k] and [k, n] (``matrix`` is m, n, k) on a device of at most ``rate``
    FLOP/s, with elements of ``itemsize`` bytes."""
    m, n, k = matrix
    if not device.processors:
        h = device.matmul_padding
        return 2.0 * batch * (m + h) * (n + h) * (k + h) / rate
    processors, border, best = device.processors, device.tile_border, math.inf
    for a, b in TILES:
        waves = math.ceil(batch * math.ceil(m / a) * math.ceil(n / b) / processors)
        best = min(best, waves * a * b * (1.0 + border / a + border / b))
    return best * 2.0 * (k + device.tile_depth / itemsize) * processors / rate


def attention_seconds(device: Device, rate: float, flops: float, width: float, keys: float) -> float:
    """Seconds of fused attention of ``flops`` with heads of ``width``, whose queries see up to ``keys`` keys. Narrow
    heads use less of a device's matrix units, which wait for softmax between two products; short rows too, since blocks
    of queries begin and end, and those on the diagonal of a causal mask are computed whole."""
    slower = (1.0 + device.attention_width / width) * (1.0 + device.attention_length / keys)
    return flops * slower / (rate * device.attention_efficiency)
