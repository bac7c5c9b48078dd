"""Fits the description of a GPU to measurements of its kernels (:mod:`.measure_kernels`).

A GPU of a known name keeps its nominal rates, against which utilisation is counted: what was measured is the share of
them that products reach, by their shapes. Of another GPU the fastest product decides what counts as its rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.cluster.device import Device
from autopar.cost.compute.matmul_efficiency import attention_seconds, product_seconds
from autopar.ir.node import SHORT_DTYPES
from autopar.solver.problem import Floats

from .fit_device import fit_attention, fit_bandwidth
from .measure_device import DeviceSamples, MatrixSample
from .relative_least_squares import least_error

# The rate of a GPU without a name, above that of its fastest product. Chosen: the best products of GPUs whose nominal
# rates are known reach about nine tenths of them.
_ABOVE = 1.1
# The start of the fit, near an H100's values (autopar/cluster/preset_devices.py), and its steps.
_START, _STEPS = (300.0, 12.0), 60


def fit_gpu(
    samples: DeviceSamples, name: str, memory_bytes: int, processors: int, known: Device | None = None
) -> tuple[Device, float]:
    """A GPU with ``processors`` multiprocessors, and the relative error of its products in bf16 (f16 where it has no
    bf16). ``known``: the preset of its name."""
    by_dtype = {s.dtype: [sample for sample in samples.matrices if sample.dtype == s.dtype] for s in samples.matrices}
    nominal = {} if known is None else dict(known.peak_flops)
    native = "bf16" if not nominal or "bf16" in nominal else "f16"
    bandwidth = fit_bandwidth(samples.pointwise, samples.launch)
    main, error = fit_tiles(by_dtype[native], processors, samples.launch, bandwidth, nominal.get(native))
    rates = {dtype: fit_rate(matrices, main) for dtype, matrices in by_dtype.items() if dtype != native}
    shares = {dtype: rate / nominal[dtype] for dtype, rate in rates.items() if dtype in nominal}
    described = replace(
        main,
        name=name,
        peak_flops={**main.peak_flops, **rates, **nominal},
        dtype_efficiency={**({} if known is None else known.dtype_efficiency), **shares},
        memory_bytes=memory_bytes,
        # That of a preset is of a program with all that it does besides.
        host_seconds=max(samples.host, 0.0 if known is None else known.host_seconds),
        # Not measured: that of the preset.
        grouped_products=1.0 if known is None else known.grouped_products,
        # Our estimate (docs/cost-model.md, "Where the numbers come from").
        reserve_bytes=3 << 29,
        reserve_fraction=0.1,
    )
    if not samples.attention:
        return described, error
    attending = fit_attention(samples.attention, described)[0]
    return replace(attending, masked_attention=fit_masked(samples, attending)), error


def fit_masked(samples: DeviceSamples, device: Device) -> float:
    """The rate of attention under a mask relative to that without, at most 1; 1 if it was not measured."""
    like = samples.attention[0]
    flops = 4.0 * like.heads * like.length**2 * like.width
    without = attention_seconds(device, device.peak_flops[like.dtype], flops, like.width, like.length)
    return min(1.0, without / max(samples.masked - samples.launch, without)) if samples.masked else 1.0


def fit_tiles(
    samples: Sequence[MatrixSample], processors: int, launch: float, bandwidth: float, rate: float | None = None
) -> tuple[Device, float]:
    """Fits ``tile_depth`` and ``tile_border`` of a device whose ``processors`` share the tiles of a product
    (:mod:`autopar.cost.compute.matmul_efficiency`), and which multiplies at ``rate`` FLOP/s, by default a little more
    than in the fastest of ``samples``, which have one dtype, and has a memory of ``bandwidth`` bytes/s. Returns it and
    the remaining relative error."""
    seconds, name = np.array([s.seconds for s in samples]), samples[0].dtype
    peak = rate or _ABOVE * max(2.0 * s.m * s.n * s.k / s.seconds for s in samples)

    def device(parameters: Floats) -> Device:
        # Numbers of Python's own: a cluster's TOML has no form for those of numpy.
        depth, border = map(float, parameters)
        return Device(
            "", {name: peak}, 1, bandwidth, launch, processors=processors, tile_depth=depth, tile_border=border
        )

    parameters, error = least_error(lambda p: _seconds(samples, device(p), peak), seconds, _START, _STEPS)
    return device(parameters), error


def fit_rate(samples: Sequence[MatrixSample], tiled: Device) -> float:
    """FLOP/s at which ``tiled`` multiplies in another dtype, that of ``samples``."""
    seconds = np.array([s.seconds for s in samples])
    fastest = max(2.0 * s.m * s.n * s.k / s.seconds for s in samples)
    (rate,), _ = least_error(lambda p: _seconds(samples, tiled, float(p[0])), seconds, (_ABOVE * fastest,), _STEPS)
    return float(rate)


def _seconds(samples: Sequence[MatrixSample], device: Device, rate: float) -> Floats:
    size = SHORT_DTYPES[samples[0].dtype].itemsize
    work = [product_seconds(device, rate, 1.0, (s.m, s.n, s.k), size) for s in samples]
    found: Floats = device.launch_seconds + np.array(work)
    return found
