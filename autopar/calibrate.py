"""Measures this machine: a :class:`~autopar.cluster.Cluster` called ``local`` from a minute of work of local
processes.

All processes work at once while each figure is taken: on a machine with fewer cores than processes what
matters is the rate each gets. Devices are fitted in :mod:`.fit_device`, collectives in :mod:`.fit_links`; the relative
errors that remain are part of the cluster's ``source``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .cluster import Cluster, Link, Rate, local_file, machine_memory
from .combine_samples import mean
from .errors import OptionsError, WorkerError
from .fit_device import fit_device, fit_gpu
from .fit_links import fit_rates
from .measure_device import measure_device
from .measure_host import with_host
from .measure_step import exchange_seconds, step_like_seconds
from .program import COLLECTIVES
from .samples import Samples

STARTUP_SECONDS = 12.0
# Processes that compute by less than this share faster alone have processors of their own.
LEAST_GAIN = 0.1
_WORKER = (
    "import sys; from autopar.measure import measure_process; "
    "measure_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))"
)


# ---- fitting --------------------------------------------------------------------------


def fit_cluster(samples: Sequence[Samples], threads: int) -> Cluster:
    """The cluster ``local`` from what each of several processes measured (their times are averaged)."""
    measured = mean(samples)
    device, errors = fit_device(measured.device, processor_name(), machine_memory() // len(samples))
    fits = {kind: fit_rates([s for s in measured.collectives if s.kind == kind]) for kind in COLLECTIVES}
    errors |= {kind: error for kind, (_, error) in fits.items()}
    rates: dict[str, tuple[Rate, ...]] = {kind: lines for kind, (lines, _) in fits.items()}
    usual = rates["all_reduce"][-1]
    link = Link("gloo", None, usual.bandwidth, usual.latency, rates)
    told = ", ".join(f"{kind} {error:.0%}" for kind, error in errors.items())
    source = (
        f"measured on this machine {time.strftime('%Y-%m-%d %H:%M')}: {len(samples)} gloo processes of "
        f"{threads} threads on {available_cores()} cores; fit errors {told}"
    )
    facts = {"processes": float(len(samples)), "threads": float(threads), "cores": float(available_cores())}
    facts |= {f"fit_error_{kind}": error for kind, error in errors.items()}
    crowded = len(samples) * threads / available_cores()
    gain = min(crowded if crowded > 1.0 else float(len(samples)), measured.alone)
    sharing = len(samples) if gain > 1.0 + LEAST_GAIN else 1
    cores = sharing / gain if sharing > 1 else 1.0
    waits = measured.synchronisation
    found = Cluster("local", source, device, (link,), 0.0, facts, waits, sharing=sharing, cores=cores, backend="gloo")
    share = measured.device.share
    found = in_step(found, measured.step * share, measured.launch * share)
    return exchanging_in_step(found, len(samples), measured.exchange)


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
    slower = replace(
        device,
        peak_flops=rates,
        memory_bandwidth=device.memory_bandwidth / factor,
        function_seconds=device.function_seconds * factor,
    )
    return replace(cluster, device=slower, measurement={**cluster.measurement, "slower_in_a_step": factor})


def exchanging_in_step(cluster: Cluster, processes: int, seconds: float) -> Cluster:
    """``cluster`` with bandwidths at which exchanging the gradients of such work takes ``seconds``, if that is more
    than it takes with the rates of collectives repeated one after the other."""
    priced, wire = exchange_seconds(replace(cluster, synchronisation_seconds=0.0), processes)  # All begin at once.
    factor = max(1.0, (seconds - priced + wire) / wire)

    def slower(link: Link) -> Link:
        rates = {
            kind: tuple(replace(rate, bandwidth=rate.bandwidth / factor) for rate in lines)
            for kind, lines in link.rates.items()
        }
        return replace(link, bandwidth=link.bandwidth / factor, rates=rates)

    facts = {**cluster.measurement, "slower_exchange_in_a_step": factor}
    return replace(cluster, links=tuple(map(slower, cluster.links)), measurement=facts)


# ---- measuring ------------------------------------------------------------------------


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    return platform.processor() or platform.machine() or "cpu"


def _run_processes(processes: int, seconds: float, threads: int, folder: Path) -> tuple[Samples, ...]:
    """Starts the processes, waits at most three times ``seconds`` (and a minute), and ends them whatever
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
        _wait(running, time.monotonic() + STARTUP_SECONDS + 3 * seconds + 60, folder)
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
    threads = max(1, available_cores() // processes)
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
    run_job(command, 300 + 4 * seconds)


def run_job(command: Sequence[str], limit: float) -> None:
    """Runs a launcher and whatever it starts. Raises :class:`WorkerError` if it fails, or, all of it ended, if it takes
    longer than ``limit`` seconds."""
    with tempfile.TemporaryFile("w+") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | None = launcher.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Workers outlive a launcher that is killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        if code != 0:
            log.seek(0)
            why = f"did not end in {limit:.0f} s" if code is None else f"failed (exit code {code})"
            raise WorkerError(f"measuring GPUs {why}:\n{log.read()[-4000:]}")


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
