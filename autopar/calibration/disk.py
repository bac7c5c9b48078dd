"""Adds the local disk of this machine to a description of its processes: ``autopar calibrate --disk``."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.cluster.description import Cluster, local_file
from autopar.cluster.device import Device
from autopar.files import FileName
from autopar.runtime.state.disk import offload_folder

from .fit_processes import available_cores
from .machine import run_processes, write_cluster
from .measure_disk import LARGE, MOMENTS, SMALL, DiskSample

_WORKER = (
    "import sys; from autopar.calibration.measure_disk import measure_disk_process; "
    "measure_disk_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))"
)
# Of a number in the state that is measured, fp32.
_BYTES = 4


def calibrate_disk(
    cluster: Cluster, processes: int = 4, seconds: float = 10.0, path: FileName | None = None
) -> Cluster:
    """``cluster`` with the disk of ``$AUTOPAR_OFFLOAD`` as each of ``processes`` processes has it while all use it,
    measured for about ``seconds`` and written to ``path``, a local path or a URL (default: where
    ``Cluster.get("local")`` looks). Raises :class:`WorkerError` if a process fails or hangs."""
    threads = max(1, available_cores() // processes)
    with tempfile.TemporaryDirectory(prefix="autopar-calibrate-") as folder:
        texts = run_processes(_WORKER, processes, seconds, threads, Path(folder))
    samples = list(map(DiskSample.from_json, texts))
    described = replace(
        cluster,
        device=with_disk(cluster.device, samples),
        source=f"{cluster.source}; disk of {offload_folder()} measured by {processes} processes",
    )
    write_cluster(path if path is not None else local_file(), described)
    return described


def with_disk(device: Device, samples: Sequence[DiskSample]) -> Device:
    """``device`` with the disk that each of several processes measured. Seconds of a piece are ``2 latency + bytes
    (1 / read + 1 / write)`` while others are read and written, which two sizes tell; the two rates differ as they do
    alone."""
    large, small, read, write = (
        statistics.fmean(getattr(sample, name) for sample in samples) for name in ("large", "small", "read", "write")
    )
    more = _BYTES * MOMENTS * (LARGE - SMALL)
    per_byte = max(large - small, 0.01 * large) / more
    latency = max(0.0, small - per_byte * _BYTES * MOMENTS * SMALL) / 2
    alone = read + write
    return replace(
        device,
        nvme_read_bandwidth=alone / read / per_byte,
        nvme_write_bandwidth=alone / write / per_byte,
        nvme_latency=latency,
        nvme_bytes=min(sample.free for sample in samples) // len(samples),
    )
