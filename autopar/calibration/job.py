"""Measures the processes of a job as a cluster. ``torchrun`` starts them on one or several hosts, with a GPU each or
none.

Levels of links are those that a launcher shows: inside a host, and between hosts. Racks and spines beyond them are not
visible; add them to the file.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster.description import Cluster, local_file
from autopar.errors import OptionsError
from autopar.files import FileName
from autopar.runtime.comm.groups import mesh_groups

from .combine_samples import mean, mean_device
from .default_cluster import CALIBRATIONS
from .fit_gpu import fit_gpu
from .fit_job import FittedLinks, fit_links
from .fit_processes import NO_LINK, as_facts, available_cores, error_text, fit_processes
from .known_gpus import preset_of
from .machine import write_cluster
from .measure_device import measure_device
from .measure_host import with_host
from .measure_kernels import measure_kernels
from .measure_links import JobShape, measure_links
from .measure_process import agree, measure_alone, measure_step, measure_synchronisation
from .samples import Samples

_Value = TypeVar("_Value")
PROCESSORS = "local-processes"


def in_job() -> bool:
    """Whether a launcher started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def calibrate_job(path: FileName | None = None, seconds: float = 90.0) -> Cluster:
    """Measures, in about ``seconds``, the cluster in which this process is one device. All processes of the job call
    this and get the same cluster; rank 0 writes it to ``path``.

    By default it is written, on the host of rank 0, where ``Cluster.get("local-gpu")`` looks, ``"local-job"`` for
    several hosts, ``"local-processes"`` without GPUs. Processes are started by ``torchrun`` (or set ``RANK``,
    ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``), the same number on every host. A process takes the GPU of its
    local rank if there is one for each, or the only GPU it sees, and messages are sent by NCCL; without GPUs, by gloo.
    Raises :class:`OptionsError` for other launches.
    """
    shape = _shape()
    device = _device(shape)
    with _processes(device):
        mesh = DeviceMesh(device.type, torch.arange(shape.hosts * shape.per_host).reshape(shape.mesh))
        agree(0.0)
        samples = measure_links(mesh_groups(mesh), shape, 0.6 * seconds)
        described = (
            _measure_gpus(device, shape, seconds) if device.type == "cuda" else _measure_processes(shape, seconds)
        )
        cluster = _with_links(described, fit_links(samples, shape, described.device), shape)
        text = [cluster.to_toml()]
        dist.broadcast_object_list(text, src=0)
        target = path if path is not None else local_file(cluster.name)
        if dist.get_rank() == 0:
            write_cluster(target, cluster)
        agree(0.0)
    return Cluster.from_toml(text[0])


def _shape() -> JobShape:
    processes, per_host = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if processes < 2 or per_host < 1 or processes % per_host:
        raise OptionsError(
            f"measuring a job takes at least 2 processes, the same number on every host; there are {processes} "
            f"in all and {per_host} here. Start it as "
            "`torchrun --nproc-per-node GPUS [--nnodes HOSTS ...] -m autopar calibrate`"
        )
    return JobShape(processes // per_host, per_host)


def _device(shape: JobShape) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible >= shape.per_host:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if visible == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:  # each process was given its own
        return torch.device("cuda", 0)
    raise OptionsError(
        f"{shape.per_host} processes on this host see {visible} GPUs: start one process per GPU, or measure processors "
        "with CUDA_VISIBLE_DEVICES= (empty)"
    )


@contextmanager
def _processes(device: torch.device) -> Iterator[None]:
    """A context in which torch.distributed runs; started here unless it already runs. Figures are exchanged by gloo
    even if there is NCCL."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if not started and "gloo" not in str(dist.get_backend_config()):
        raise OptionsError('measuring needs gloo in addition to NCCL: dist.init_process_group("cpu:gloo,cuda:nccl")')
    if started:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        if int(os.environ["LOCAL_WORLD_SIZE"]) != int(agree(float(os.environ["LOCAL_WORLD_SIZE"]))[0]):
            raise OptionsError("hosts have different numbers of processes: start the same number on each")
        yield
    finally:
        if started:
            dist.destroy_process_group()


def _gathered(value: _Value) -> list[_Value]:
    values: list[_Value | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [gathered for gathered in values if gathered is not None]


def _measure_gpus(device: torch.device, shape: JobShape, seconds: float) -> Cluster:
    """Measures the GPUs of all processes at once. Their times are averaged."""
    gpu = torch.cuda.get_device_properties(device)
    samples = mean_device(_gathered(measure_kernels(device, 0.3 * seconds, lambda: agree(0.0))))
    preset = preset_of(gpu.name, int(gpu.total_memory))
    known = None if preset is None else preset.device
    fitted, error = fit_gpu(samples, gpu.name, int(gpu.total_memory), int(gpu.multi_processor_count), known)
    described = with_host(fitted, device, shape.per_host, 0.05 * seconds)
    source = f"GPUs {gpu.name}; fit error matmul {error:.0%}"
    return Cluster(
        name="",
        source=source,
        device=described,
        links=(NO_LINK,),
        collective_seconds=0.0,
        measurement={"fit_error_matmul": error},
        overlaps=True,
    )


def _measure_processes(shape: JobShape, seconds: float) -> Cluster:
    """Measures processes that share the cores of their hosts."""
    processes, threads = shape.hosts * shape.per_host, max(1, available_cores() // shape.per_host)
    torch.set_num_threads(threads)
    cpu, rank = torch.device("cpu"), dist.get_rank()
    # Shares of the time that is not used for links. Chosen by the number of figures that each measures.
    device = measure_device(cpu, 0.2 * seconds, lambda: agree(0.0))
    waiting = measure_synchronisation(processes, 0.05 * seconds)
    alone = measure_alone(rank, processes, 0.05 * seconds)
    step = measure_step(processes, 0.1 * seconds)
    everyone = _gathered(Samples(device, (), waiting, alone, **asdict(step)))
    gain = min(float(shape.per_host), statistics.fmean(samples.alone for samples in everyone))
    return fit_processes(mean(everyone), shape.per_host, threads, gain)[0]


def _with_links(described: Cluster, fitted: FittedLinks, shape: JobShape) -> Cluster:
    source = (
        f"measured {time.strftime('%Y-%m-%d %H:%M')} on {shape.hosts} host{'s' if shape.hosts > 1 else ''} like "
        f"{platform.node()}, {shape.per_host} processes each: {described.source}, {error_text(fitted.errors)}"
    )
    facts: Mapping[str, float] = {
        **described.measurement,
        "hosts": float(shape.hosts),
        "processes": float(shape.hosts * shape.per_host),
        **as_facts(fitted.errors),
    }
    return replace(
        described,
        name=CALIBRATIONS[shape.hosts > 1] if described.backend == "nccl" else PROCESSORS,
        source=source,
        links=fitted.links,
        measurement=facts,
        algorithms=fitted.algorithms,
    )
