"""Fits the description of a device to measurements. Minimises the relative errors of the formulas with which plans are
priced (:mod:`autopar.cost.compute.roofline`, :mod:`autopar.cost.compute.matmul_efficiency`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.cluster.device import Device
from autopar.cost.compute.matmul_efficiency import attention_seconds, product_seconds
from autopar.ir.node import SHORT_DTYPES
from autopar.solver.problem import Floats

from .measure_device import FUNCTION_ELEMENTS, AttentionSample, DeviceSamples, MatrixSample
from .relative_least_squares import least_error, nonnegative_fit


def fit_matrices(samples: Sequence[MatrixSample], launch: float, bandwidth: float) -> tuple[Device, float]:
    """Fits the rate (as ``peak_flops``), ``matmul_padding`` and ``memory_stalls`` of a processor. Returns them and the
    remaining relative error. ``samples`` have one dtype; their operands come from memory at ``bandwidth``."""
    seconds = np.array([s.seconds for s in samples])
    name, size = samples[0].dtype, SHORT_DTYPES[samples[0].dtype].itemsize
    fastest = max(2.0 * s.m * s.n * s.k / s.seconds for s in samples)
    traffic = np.array([size * (s.m * s.k + s.k * s.n + s.m * s.n) for s in samples]) / bandwidth

    def device(parameters: Floats) -> Device:
        rates, stalls = {name: float(parameters[0])}, min(1.0, float(parameters[2]))
        return Device("", rates, 1, bandwidth, launch, matmul_padding=float(parameters[1]), memory_stalls=stalls)

    def model(parameters: Floats) -> Floats:
        fitted = device(parameters)
        rate = float(parameters[0])
        work: Floats = np.array([product_seconds(fitted, rate, 1.0, (s.m, s.n, s.k), size) for s in samples])
        return launch + np.maximum(work, traffic) + fitted.memory_stalls * np.minimum(work, traffic)

    # Chosen: the start of the fit.
    parameters, error = least_error(model, seconds, (1.1 * fastest, 2.0, 0.5))
    return device(parameters), error


def fit_bandwidth(pointwise: Sequence[tuple[int, float]], launch: float) -> float:
    """Fits the bytes per second of elementwise operations."""
    nbytes, seconds = np.array(pointwise, dtype=np.float64).T
    # At least a tenth of the seconds remains, even if launches alone were measured as longer. Chosen, not measured.
    slope = nonnegative_fit(nbytes[:, None], np.maximum(seconds - launch, 0.1 * seconds))
    return float(1.0 / slope[0])


def fit_attention(samples: Sequence[AttentionSample], device: Device) -> tuple[Device, float]:
    """Fits ``attention_efficiency``, ``attention_width`` and ``attention_length``. Returns ``device`` with them, and
    the remaining relative error."""
    seconds = np.array([s.seconds for s in samples])
    flops = [s.heads * s.length**2 * s.width * (5 if s.backward else 2) for s in samples]  # Causal: half the FLOPs.
    rate = device.peak_flops[samples[0].dtype]

    def fitted(parameters: Floats) -> Device:
        efficiency, width, length = map(float, parameters)
        best = min(1.0, efficiency)
        return replace(device, attention_efficiency=best, attention_width=width, attention_length=length)

    def model(parameters: Floats) -> Floats:
        known = fitted(parameters)
        pairs = zip(flops, samples, strict=True)
        return device.launch_seconds + np.array(
            [attention_seconds(known, rate, f, s.width, s.length) for f, s in pairs]
        )

    # Chosen: the start of the fit.
    parameters, error = least_error(model, seconds, (0.5, 30.0, 30.0))
    return fitted(parameters), error


def fit_device(samples: DeviceSamples, name: str, memory_bytes: int) -> tuple[Device, dict[str, float]]:
    """Fits a processor. Returns it and the remaining relative errors of its matrix products in f32 and, if measured, of
    attention."""
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
    )
    if not samples.attention:
        return device, {"matmul": error}
    with_attention, attention_error = fit_attention(samples.attention, device)
    return with_attention, {"matmul": error, "attention": attention_error}
