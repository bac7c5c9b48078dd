"""The description of a device from measurements of it: least relative errors of the very formulas that plans are
priced with (:mod:`autopar.cost.compute.roofline`, :mod:`autopar.cost.compute.matmul_efficiency`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.cluster.device import Device
from autopar.cost.compute.matmul_efficiency import attention_seconds, product_seconds
from autopar.ir.node import SHORT_DTYPES
from autopar.solver.problem import Floats

from .measure_device import FUNCTION_ELEMENTS, HEADS, UPDATED, AttentionSample, DeviceSamples, MatrixSample
from .relative_least_squares import least_error, nonnegative_fit

# What AdamW reads and writes of each element at the least: value, gradient and two states; value and two states.
UPDATED_BYTES = 7 * sum(4 * math.prod(shape) for shape in UPDATED)


def fit_matrices(samples: Sequence[MatrixSample], launch: float, bandwidth: float) -> tuple[Device, float]:
    """The rate (as ``peak_flops``), ``matmul_padding`` and ``memory_stalls`` of a processor, and the relative error
    that remains. ``samples`` are of one dtype, on operands that come from memory at ``bandwidth``."""
    seconds = np.array([s.seconds for s in samples])
    name, size = samples[0].dtype, SHORT_DTYPES[samples[0].dtype].itemsize
    fastest = max(2.0 * s.m * s.n * s.k / s.seconds for s in samples)
    traffic = np.array([size * (s.m * s.k + s.k * s.n + s.m * s.n) for s in samples]) / bandwidth

    def device(found: Floats) -> Device:
        rates, stalls = {name: float(found[0])}, min(1.0, float(found[2]))
        return Device("", rates, 1, bandwidth, launch, matmul_padding=float(found[1]), memory_stalls=stalls)

    def model(found: Floats) -> Floats:
        one = device(found)
        work: Floats = np.array([product_seconds(one, float(found[0]), 1.0, (s.m, s.n, s.k), size) for s in samples])
        return launch + np.maximum(work, traffic) + one.memory_stalls * np.minimum(work, traffic)

    # Chosen: where the fit starts.
    found, error = least_error(model, seconds, (1.1 * fastest, 2.0, 0.5))
    return device(found), error


def fit_tiles(samples: Sequence[MatrixSample], processors: int, launch: float) -> tuple[Device, float]:
    """The rate (as ``peak_flops``), ``tile_depth`` and ``tile_border`` of a device whose ``processors`` share the tiles
    of a product (:mod:`autopar.cost.compute.matmul_efficiency`), and the relative error that remains. ``samples`` are
    of one dtype."""
    seconds = np.array([s.seconds for s in samples])
    name, size = samples[0].dtype, SHORT_DTYPES[samples[0].dtype].itemsize
    fastest = max(2.0 * s.m * s.n * s.k / s.seconds for s in samples)

    def device(found: Floats) -> Device:
        peak = {name: float(found[0])}
        return Device("", peak, 1, 1.0, launch, processors=processors, tile_depth=found[1], tile_border=found[2])

    def model(found: Floats) -> Floats:
        tiled = device(found)
        work = [product_seconds(tiled, float(found[0]), 1.0, (s.m, s.n, s.k), size) for s in samples]
        return launch + np.array(work)

    # Chosen: where the fit starts, near an H100's (autopar/cluster/preset_devices.py).
    found, error = least_error(model, seconds, (1.1 * fastest, 300.0, 12.0), 60)
    return device(found), error


def fit_bandwidth(pointwise: Sequence[tuple[int, float]], launch: float) -> float:
    """Bytes per second of elementwise operations."""
    nbytes, seconds = np.array(pointwise, dtype=np.float64).T
    # At least a tenth is left, where launches alone were measured as longer. Chosen, not measured.
    slope = nonnegative_fit(nbytes[:, None], np.maximum(seconds - launch, 0.1 * seconds))
    return float(1.0 / slope[0])


def fit_attention(samples: Sequence[AttentionSample], device: Device) -> tuple[float, float, float]:
    """``attention_efficiency``, ``attention_width``, and the relative error that remains."""
    seconds = np.array([s.seconds for s in samples])
    flops = [HEADS * s.length**2 * s.width * (5 if s.backward else 2) for s in samples]  # Causal: half of them.
    rate = device.peak_flops["f32"]

    def model(found: Floats) -> Floats:
        one = replace(device, attention_efficiency=min(1.0, float(found[0])), attention_width=float(found[1]))
        work = [attention_seconds(one, rate, f, s.width) for f, s in zip(flops, samples, strict=True)]
        return device.launch_seconds + np.array(work)

    # Chosen: where the fit starts.
    found, error = least_error(model, seconds, (0.5, 30.0))
    return min(1.0, float(found[0])), float(found[1]), error


def fit_gpu(samples: DeviceSamples, name: str, memory_bytes: int, processors: int) -> tuple[Device, float]:
    """The device of so many multiprocessors behind ``samples``, and the relative error of its products in bf16."""
    by_dtype = {s.dtype: [one for one in samples.matrices if one.dtype == s.dtype] for s in samples.matrices}
    fits = {dtype: fit_tiles(found, processors, samples.launch) for dtype, found in by_dtype.items()}
    main, error = fits["bf16"]
    device = replace(
        main,
        name=name,
        peak_flops={dtype: fitted.peak_flops[dtype] for dtype, (fitted, _) in fits.items()},
        memory_bytes=memory_bytes,
        memory_bandwidth=fit_bandwidth(samples.pointwise, samples.launch),
        view_seconds=samples.view,
        # Our estimate (docs/cost-model.md, "Where the numbers come from").
        reserve_bytes=3 << 29,
        reserve_fraction=0.1,
    )
    return device, error


def fit_device(samples: DeviceSamples, name: str, memory_bytes: int) -> tuple[Device, dict[str, float]]:
    """The processor behind ``samples``, and the relative errors that remain of its matrix products in f32 and, where
    it was measured, of attention."""
    f32 = [s for s in samples.matrices if s.dtype == "f32"]
    bandwidth = fit_bandwidth(samples.pointwise, samples.launch)
    main, error = fit_matrices(f32, samples.launch, bandwidth)
    rates = dict(main.peak_flops)
    for dtype in sorted({s.dtype for s in samples.matrices} - {"f32"}):
        largest = max((s for s in samples.matrices if s.dtype == dtype), key=lambda s: s.m * s.n * s.k)
        work = 2.0 * math.prod(size + main.matmul_padding for size in (largest.m, largest.n, largest.k))
        rates[dtype] = work / max(largest.seconds - samples.launch, 0.1 * largest.seconds)
    device = replace(
        main,
        name=name,
        peak_flops=rates,
        memory_bytes=memory_bytes,
        view_seconds=samples.view,
        reserve_fraction=0.1,
        function_seconds=max(0.0, samples.function - samples.launch) / FUNCTION_ELEMENTS,
        update_bandwidth=UPDATED_BYTES / samples.update if samples.update else 0.0,
    )
    if not samples.attention:
        return device, {"matmul": error}
    efficiency, width, left = fit_attention(samples.attention, device)
    found = replace(device, attention_efficiency=efficiency, attention_width=width)
    return found, {"matmul": error, "attention": left}
