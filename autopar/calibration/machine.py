"""Measures this machine, in about a minute of work by local processes, as a
:class:`~autopar.cluster.description.Cluster` called ``local``.

All processes work at once while each figure is measured: on a machine with fewer cores than processes, the rate that
each process gets matters. :mod:`.fit_processes` fits the cluster to what they measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from autopar.cluster.description import Cluster, Link, local_file
from autopar.errors import OptionsError, WorkerError
from autopar.files import FileName, local_path, sibling, write_text

from .fit_gpu import fit_gpu
from .fit_processes import available_cores, fit_cluster
from .known_gpus import preset_of
from .measure_host import with_host
from .measure_kernels import measure_kernels
from .samples import Samples

# The part of the requested seconds in which processes start and join the group. Chosen, not measured.
STARTUP_SECONDS = 12.0
_WORKER = (
    "import sys; from autopar.calibration.measure_process import measure_process; "
    "measure_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))"
)


def run_processes(worker: str, processes: int, seconds: float, threads: int, folder: Path) -> tuple[str, ...]:
    """Starts processes that run the code ``worker``, waits at most three times ``seconds`` and a minute, and ends them
    in any case. Returns what each wrote to ``folder/<rank>.json``. Raises :class:`WorkerError`."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    running = []
    try:
        for rank in range(processes):
            command = [sys.executable, "-c", worker, str(folder), str(rank), str(processes), str(seconds)]
            with open(folder / f"{rank}.log", "w") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        _wait(running, time.monotonic() + STARTUP_SECONDS + 3 * seconds + 60, folder)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return tuple((folder / f"{rank}.json").read_text() for rank in range(processes))


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


def calibrate(processes: int = 4, seconds: float = 40.0, path: FileName | None = None) -> Cluster:
    """Measures ``processes`` gloo processes on this machine in about ``seconds`` and writes the cluster to
    ``path``, a local path or a URL.

    The default ``path`` is where ``Cluster.get("local")`` looks (:func:`autopar.cluster.description.local_file`). If
    there are GPUs, they and their links are measured too, and written to the same folder as ``local-gpu``. Raises
    :class:`WorkerError` if a process fails or hangs.
    """
    if processes < 2:
        raise OptionsError(f"calibrating collectives takes at least 2 processes, not {processes}")
    threads = max(1, available_cores() // processes)
    with tempfile.TemporaryDirectory(prefix="autopar-calibrate-") as folder:
        work = max(1.0, seconds - STARTUP_SECONDS)
        texts = run_processes(_WORKER, processes, work, threads, Path(folder))
    cluster = fit_cluster(tuple(map(Samples.from_json, texts)), threads)
    target = path if path is not None else local_file()
    write_cluster(target, cluster)
    if torch.cuda.is_available():
        _calibrate_gpus(sibling(target, "local-gpu.toml"), seconds)
    return cluster


def _calibrate_gpus(target: str, seconds: float) -> None:
    """Measures the GPUs of this machine and writes them to ``target``. Several GPUs are measured by a job with one
    process each (:mod:`.job`), started by torchrun."""
    count = torch.cuda.device_count()
    if count == 1:
        write_cluster(target, measure_gpu())
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", "autopar", "calibrate", "--seconds", str(seconds), "--output", target]
    run_job(command, 300 + 4 * seconds)


def run_job(command: Sequence[str], limit: float) -> None:
    """Runs a launcher and the processes it starts. Raises :class:`WorkerError` if it fails, or if it takes longer than
    ``limit`` seconds; all its processes are then ended."""
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
            outcome = f"did not end in {limit:.0f} s" if code is None else f"failed (exit code {code})"
            raise WorkerError(f"measuring GPUs {outcome}:\n{log.read()[-4000:]}")


def write_cluster(path: FileName, cluster: Cluster) -> None:
    """Writes the description; a local folder is made. Raises :class:`OptionsError`."""
    local = local_path(path)
    if local is not None:
        local.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, cluster.to_toml())


def measure_gpu(seconds: float = 10.0) -> Cluster:
    """One GPU of this machine as a cluster of one device called ``local-gpu``."""
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_properties(device)
    samples = measure_kernels(device, seconds)
    preset = preset_of(gpu.name, int(gpu.total_memory))
    known = None if preset is None else preset.device
    fitted, error = fit_gpu(samples, gpu.name, int(gpu.total_memory), int(gpu.multi_processor_count), known)
    fitted = with_host(fitted, device, 1, 1.0)
    when = time.strftime("%Y-%m-%d %H:%M")
    source = f"measured on this machine {when}: one {gpu.name}; fit error matmul {error:.0%}"
    # One device has no links: the numbers of this link are never used.
    return Cluster("local-gpu", source, fitted, (Link("none", 1, 1.0, 0.0),), overlaps=True)
