"""Seconds of matrix products and fused attention at full speed of their operands: efficiency by shape.

A library computes a product in tiles of the result, dealt out to the device's multiprocessors in waves, the last of
which may leave most of them idle. With T(a, b) tiles of a x b among P processors, and device constants d
(``tile_depth``) and c (``tile_border``),

    seconds = min over tiles a x b of  ceil(T / P) · 2 a b (k + d) · (1 + c/a + c/b) / (rate / P)

d is what a tile takes to fill its pipeline and write its result, as an inner dim of so many bytes; c says what fetching
takes beside multiplying: of the operands of a tile a + b rows are read, and used a b times. The library tries tiles of
many shapes; those of :data:`TILES` are enough to see its steps. Neither a smaller product nor fewer of them is
dearer, since every term grows with m, n, k and their number.
"""

from __future__ import annotations

import math

from autopar.cluster.device import Device

# Chosen: common tiles of cuBLAS and CUTLASS; the device's constants were fitted with these.
TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


def product_seconds(
    device: Device, rate: float, batch: float, matrix: tuple[float, float, float], itemsize: int = 2
) -> float:
    """Seconds of ``batch`` products of [m, k] and [k, n] (``matrix`` is m, n, k) on a device that does ``rate`` FLOP/s
    at the most, of elements of ``itemsize`` bytes."""
    m, n, k = matrix
    if not device.processors:
        h = device.matmul_padding
        return 2.0 * batch * (m + h) * (n + h) * (k + h) / rate
    processors, border, best = device.processors, device.tile_border, math.inf
    for a, b in TILES:
        waves = math.ceil(batch * math.ceil(m / a) * math.ceil(n / b) / processors)
        best = min(best, waves * a * b * (1.0 + border / a + border / b))
    return best * 2.0 * (k + device.tile_depth / itemsize) * processors / rate


def attention_seconds(device: Device, rate: float, flops: float, width: float) -> float:
    """Seconds of fused attention of ``flops`` with heads of ``width``; narrow heads use less of a device's matrix
    units, which softmax keeps waiting between two products."""
    return flops * (1.0 + device.attention_width / width) / (rate * device.attention_efficiency)
