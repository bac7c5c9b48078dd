"""Measures this machine: a :class:`~autopar.cluster.Cluster` called ``local`` from a minute of work of local
processes.

All processes work at once while each figure is taken: on a machine with fewer cores than processes what
matters is the rate each gets. The rates of collectives are fitted per kind by least squares of relative
errors over message and group sizes, to the very formula plans are priced with
(:mod:`autopar.cost.collective`), with one line, or two where the measurements bend; the relative error that
remains is part of the cluster's ``source``.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.algorithms import steps, traffic
from autopar.cost.products import product_seconds

from .cluster import Cluster, Device, Link, Rate, local_file, machine_memory
from .errors import OptionsError, WorkerError
from .graph import SHORT_DTYPES
from .least_error import least_error, nonnegative_fit
from .measure import CollectiveSample, DeviceSamples, MatrixSample, Samples, measure_device
from .measure_host import with_host
from .measure_step import exchange_seconds, step_like_seconds
from .program import COLLECTIVES

Floats = NDArray[np.float64]
STARTUP_SECONDS = 12.0
# A richer model must lessen the relative error by more than this, or it fits rounding.
TOLERANCE = 0.005
# Processes that compute by less than this share faster alone have processors of their own.
LEAST_GAIN = 0.1
_WORKER = (
    "import sys; from autopar.measure import measure_process; "
    "measure_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))"
)


# ---- fitting --------------------------------------------------------------------------


def relative_error(predicted: Floats, seconds: Floats) -> float:
    """Root mean square of the relative errors."""
    return float(np.sqrt(np.mean(np.square(predicted / seconds - 1.0))))


def _fit_lines(samples: Sequence[CollectiveSample], growth: float) -> tuple[tuple[Rate, ...], float]:
    """Rates of that growth: one line, or two if a bend between message sizes lessens the error by a
    quarter."""
    moved = [traffic(s.kind, s.members) * s.nbytes for s in samples]
    features = np.array([[steps(s.kind, s.members, growth) for s in samples], moved]).T
    seconds, nbytes = np.array([s.seconds for s in samples]), np.array([s.nbytes for s in samples])
    lines = [nonnegative_fit(features, seconds)]
    error = relative_error(features @ lines[0], seconds)
    for knee in sorted(set(nbytes))[2:-1]:
        pair = [nonnegative_fit(features[side], seconds[side]) for side in (nbytes < knee, nbytes >= knee)]
        found = relative_error(np.max([features @ line for line in pair], axis=0), seconds)
        if found < 0.75 * error - TOLERANCE:
            lines, error = pair, found
    return tuple(Rate(float(a), 1.0 / float(b) if b > 0 else math.inf, growth) for a, b in lines), error


def fit_rates(samples: Sequence[CollectiveSample]) -> tuple[tuple[Rate, ...], float]:
    """Rates of one kind of collective, and the relative error that remains; a growth above 1 must lessen it
    by a tenth per step of a half."""
    rates, error = _fit_lines(samples, 1.0)
    threshold = 0.9 * error - TOLERANCE
    for growth in np.arange(1.5, 5.0, 0.5):
        found, left = _fit_lines(samples, float(growth))
        if left < threshold:
            rates, error, threshold = found, left, 0.9 * left - TOLERANCE
    return rates, error


def fit_matrices(samples: Sequence[MatrixSample], launch: float) -> tuple[float, float, float]:
    """FLOP/s, padding of each dim (see :class:`~autopar.cluster.Device`), and the relative error that
    remains."""
    seconds = np.array([s.seconds for s in samples])
    shapes = np.array([[s.m, s.n, s.k] for s in samples], dtype=np.float64)
    best = (0.0, 0.0, math.inf)
    for padding in (0.0, *np.geomspace(1, 256, 33)):
        work = 2.0 * np.prod(shapes + padding, axis=1)[:, None]
        slope = float(nonnegative_fit(work, np.maximum(seconds - launch, 0.1 * seconds))[0])
        error = relative_error(launch + slope * work[:, 0], seconds)
        if error < best[2]:
            best = (1.0 / slope, float(padding), error)
    return best


def fit_tiles(samples: Sequence[MatrixSample], processors: int, launch: float) -> tuple[Device, float]:
    """The rate (as ``peak_flops``), ``tile_depth`` and ``tile_border`` of a device whose ``processors`` share the tiles
    of a product (:mod:`autopar.cost.products`), and the relative error that remains. ``samples`` are of one dtype."""
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

    found, error = least_error(model, seconds, (1.1 * fastest, 300.0, 12.0), 60)
    return device(found), error


def fit_bandwidth(pointwise: Sequence[tuple[int, float]], launch: float) -> float:
    """Bytes per second of elementwise operations."""
    nbytes, seconds = np.array(pointwise, dtype=np.float64).T
    slope = nonnegative_fit(nbytes[:, None], np.maximum(seconds - launch, 0.1 * seconds))
    return float(1.0 / slope[0])


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
        reserve_bytes=3 << 29,
        reserve_fraction=0.1,
    )
    return device, error


def fit_device(samples: DeviceSamples, name: str, memory_bytes: int) -> tuple[Device, float]:
    """The device behind ``samples``, and the relative error of its matrix products in f32."""
    rates, padding, error = {}, 0.0, 0.0
    f32 = [s for s in samples.matrices if s.dtype == "f32"]
    rates["f32"], padding, error = fit_matrices(f32, samples.launch)
    for dtype in sorted({s.dtype for s in samples.matrices} - {"f32"}):
        largest = max((s for s in samples.matrices if s.dtype == dtype), key=lambda s: s.m * s.n * s.k)
        work = 2.0 * math.prod(size + padding for size in (largest.m, largest.n, largest.k))
        rates[dtype] = work / max(largest.seconds - samples.launch, 0.1 * largest.seconds)
    bandwidth = fit_bandwidth(samples.pointwise, samples.launch)
    device = Device(
        name,
        rates,
        memory_bytes,
        bandwidth,
        launch_seconds=samples.launch,
        view_seconds=samples.view,
        matmul_padding=padding,
        reserve_fraction=0.1,
    )
    return device, error


def fit_cluster(samples: Sequence[Samples], threads: int) -> Cluster:
    """The cluster ``local`` from what each of several processes measured (their times are averaged)."""
    device, matrix_error = fit_device(
        mean_device([s.device for s in samples]), processor_name(), machine_memory() // len(samples)
    )
    measured = _mean_collectives(samples)
    fits = {kind: fit_rates([s for s in measured if s.kind == kind]) for kind in COLLECTIVES}
    errors: dict[str, float] = {"matmul": matrix_error}
    errors |= {kind: error for kind, (_, error) in fits.items()}
    rates: dict[str, tuple[Rate, ...]] = {kind: lines for kind, (lines, _) in fits.items()}
    usual = rates["all_reduce"][-1]
    link = Link("gloo", None, usual.bandwidth, usual.latency, rates)
    told = ", ".join(f"{kind} {error:.0%}" for kind, error in errors.items())
    source = (
        f"measured on this machine {time.strftime('%Y-%m-%d %H:%M')}: {len(samples)} gloo processes of "
        f"{threads} threads on {_cores()} cores; fit errors {told}"
    )
    facts = {"processes": float(len(samples)), "threads": float(threads), "cores": float(_cores())}
    facts |= {f"fit_error_{kind}": error for kind, error in errors.items()}
    waiting = statistics.fmean(s.synchronisation for s in samples)
    gain = min(float(len(samples)), statistics.fmean(s.alone for s in samples))
    sharing = len(samples) if gain > 1.0 + LEAST_GAIN else 1
    cores = sharing / gain if sharing > 1 else 1.0
    found = Cluster("local", source, device, (link,), 0.0, facts, waiting, sharing=sharing, cores=cores, backend="gloo")
    step, launch, exchange = (statistics.fmean(getattr(s, n) for s in samples) for n in ("step", "launch", "exchange"))
    return exchanging_in_step(in_step(found, step, launch * gain), len(samples), exchange)


def in_step(cluster: Cluster, seconds: float, launch: float) -> Cluster:
    """``cluster`` with rates of computing at which work like a step (:mod:`.measure_step`) takes ``seconds``, and every
    operation ``launch``, if these are more than with the rates of operations repeated one by one."""
    later = max(1.0, launch / cluster.device.launch_seconds)
    device = replace(
        cluster.device,
        launch_seconds=cluster.device.launch_seconds * later,
        view_seconds=cluster.device.view_seconds * later,
    )
    factor = max(1.0, seconds / step_like_seconds(replace(cluster, device=device)))
    rates = {dtype: rate / factor for dtype, rate in device.peak_flops.items()}
    slower = replace(device, peak_flops=rates, memory_bandwidth=device.memory_bandwidth / factor)
    return replace(cluster, device=slower, measurement={**cluster.measurement, "slower_in_a_step": factor})


def exchanging_in_step(cluster: Cluster, processes: int, seconds: float) -> Cluster:
    """``cluster`` with bandwidths at which exchanging the gradients of such work takes ``seconds``, if that is more
    than it takes with the rates of collectives repeated one after the other."""
    priced, wire = exchange_seconds(cluster, processes)
    factor = max(1.0, (seconds - priced + wire) / wire)

    def slower(link: Link) -> Link:
        rates = {
            kind: tuple(replace(rate, bandwidth=rate.bandwidth / factor) for rate in lines)
            for kind, lines in link.rates.items()
        }
        return replace(link, bandwidth=link.bandwidth / factor, rates=rates)

    facts = {**cluster.measurement, "slower_exchange_in_a_step": factor}
    return replace(cluster, links=tuple(map(slower, cluster.links)), measurement=facts)


def mean_device(devices: Sequence[DeviceSamples]) -> DeviceSamples:
    """The means of what several processes measured at once."""
    matrices = zip(*(d.matrices for d in devices), strict=True)
    pointwise = zip(*(d.pointwise for d in devices), strict=True)
    return DeviceSamples(
        statistics.fmean(d.launch for d in devices),
        statistics.fmean(d.view for d in devices),
        tuple(replace(same[0], seconds=statistics.fmean(s.seconds for s in same)) for same in matrices),
        tuple((same[0][0], statistics.fmean(seconds for _, seconds in same)) for same in pointwise),
    )


def _mean_collectives(samples: Sequence[Samples]) -> list[CollectiveSample]:
    together = zip(*(s.collectives for s in samples), strict=True)
    return [replace(same[0], seconds=statistics.fmean(s.seconds for s in same)) for same in together]


# ---- measuring ------------------------------------------------------------------------


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    return platform.processor() or platform.machine() or "cpu"


def _run_processes(processes: int, seconds: float, threads: int, folder: Path) -> tuple[Samples, ...]:
    """Starts the processes, waits at most twice ``seconds`` (and the startup), and ends them whatever
    happens."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    running = []
    try:
        for rank in range(processes):
            command = [sys.executable, "-c", _WORKER, str(folder), str(rank), str(processes), str(seconds)]
            with open(folder / f"{rank}.log", "w") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        _wait(running, time.monotonic() + STARTUP_SECONDS + 2 * seconds + 30, folder)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return tuple(Samples.from_json((folder / f"{rank}.json").read_text()) for rank in range(processes))


def _wait(running: Sequence[subprocess.Popen[bytes]], deadline: float, folder: Path) -> None:
    while any(process.poll() is None for process in running):
        failed = [rank for rank, process in enumerate(running) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for rank, process in enumerate(running):
        code = process.poll()
        if code not in (None, 0):
            log = (folder / f"{rank}.log").read_text()[-4000:]
            raise WorkerError(f"rank {rank} of {len(running)} failed while measuring (exit code {code}):\n{log}")
    late = [rank for rank, process in enumerate(running) if process.poll() is None]
    if late:
        raise WorkerError(f"measuring did not end in time; ranks {late} of {len(running)} were still at work")


def calibrate(processes: int = 4, seconds: float = 40.0, path: str | os.PathLike[str] | None = None) -> Cluster:
    """Measures ``processes`` gloo processes on this machine in about ``seconds`` and writes the cluster to
    ``path``.

    By default it goes where ``Cluster.get("local")`` looks (:func:`autopar.cluster.local_file`). Where there
    are GPUs, they and their links are measured too and described beside it as ``local-gpu``. Raises
    :class:`WorkerError` if a process fails or hangs.
    """
    if processes < 2:
        raise OptionsError(f"calibrating collectives takes at least 2 processes, not {processes}")
    threads = max(1, _cores() // processes)
    with tempfile.TemporaryDirectory(prefix="autopar-calibrate-") as folder:
        work = max(1.0, seconds - STARTUP_SECONDS)
        samples = _run_processes(processes, work, threads, Path(folder))
    cluster = fit_cluster(samples, threads)
    target = Path(path).expanduser() if path is not None else local_file()
    write_cluster(target, cluster)
    if torch.cuda.is_available():
        _calibrate_gpus(target.with_name("local-gpu.toml"), seconds)
    return cluster


def _calibrate_gpus(target: Path, seconds: float) -> None:
    """Writes what the GPUs of this machine are to ``target``: several are measured by a job of a process each
    (:mod:`.calibrate_job`), as torchrun starts it."""
    count = torch.cuda.device_count()
    if count == 1:
        write_cluster(target, measure_gpu())
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", "autopar", "calibrate", "--seconds", str(seconds), "--output", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300 + 4 * seconds)
    if done.returncode:
        raise WorkerError(f"measuring {count} GPUs failed (exit code {done.returncode}):\n{done.stderr[-4000:]}")


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Writes beside, then renames: another process may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(cluster.to_toml())
    unfinished.replace(path)


def measure_gpu(seconds: float = 10.0) -> Cluster:
    """One GPU of this machine as a cluster of one device called ``local-gpu``."""
    device = torch.device("cuda", torch.cuda.current_device())
    about = torch.cuda.get_device_properties(device)
    samples = measure_device(device, seconds)
    found, error = fit_gpu(samples, about.name, int(about.total_memory), int(about.multi_processor_count))
    found = with_host(found, device, 1, 1.0)
    when = time.strftime("%Y-%m-%d %H:%M")
    source = f"measured on this machine {when}: one {about.name}; fit error matmul {error:.0%}"
    # One device has no links: the numbers below are never used.
    return Cluster("local-gpu", source, found, (Link("none", 1, 1.0, 0.0),), overlaps=True)
