"""Measures every pair of hosts of a job, and gathers what its processes are: for ``autopar doctor``."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import OptionsError
from autopar.runtime.comm.devices import own_gpu
from autopar.supported import installed_version

# Bytes of a message. Chosen: a thousand times what a latency of Ethernet is worth.
_MESSAGE = 8 << 20
# Messages of which the median counts. Chosen: one or two that something else delayed do not.
_ROUNDS = 5
# Clocks are read in rounds of a barrier; the least difference counts. Chosen: steady by then.
_CLOCK_ROUNDS = 8


@dataclass(frozen=True)
class ProcessFacts:
    """What one process of a job is. ``shared``: free bytes of ``/dev/shm``, None where there is none."""

    rank: int
    host: str
    local_rank: int
    versions: tuple[tuple[str, str], ...]
    device: str
    shared: int | None


@dataclass(frozen=True)
class HostPair:
    """Messages between the first processes of two hosts, by gloo: bytes per second one way, and seconds of an empty
    one."""

    first: str
    second: str
    bandwidth: float
    latency: float


def process_facts(host: str | None = None) -> ProcessFacts:
    """Of this process; ``host``: its host's name."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "autopar": installed_version()}
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else None
    return ProcessFacts(dist.get_rank(), host or socket.gethostname(), local, tuple(versions.items()), _device(), free)


def _device() -> str:
    """The GPU that training would take."""
    if not torch.cuda.is_available():
        return "CPU"
    try:
        return torch.cuda.get_device_name(own_gpu())
    except OptionsError:
        return f"no GPU of its own, of {torch.cuda.device_count()}"


def all_facts(host: str | None = None) -> list[ProcessFacts]:
    """Of all processes, by rank. All call this."""
    found: list[ProcessFacts | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, process_facts(host))
    return [facts for facts in found if facts is not None]


def clock_spread() -> float:
    """Seconds by which the clocks of the processes differ, at most by the time that a barrier takes too much. All
    processes call this and get the same."""
    spreads = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier()
        now = torch.tensor([time.time()], dtype=torch.float64)
        everyone = [torch.zeros_like(now) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, now)
        times = [float(one) for one in everyone]
        spreads.append(max(times) - min(times))
    return min(spreads)


def measure_pairs(facts: list[ProcessFacts]) -> tuple[HostPair, ...]:
    """Every pair of hosts, in as many rounds as there are other hosts: in a round, each host exchanges with one. All
    processes call this and get the same."""
    leaders: dict[str, int] = {}
    for fact in facts:
        leaders.setdefault(fact.host, fact.rank)
    names, mine = list(leaders), {}
    for matches in rounds(len(names)):
        dist.barrier()
        for first, second in ((names[a], names[b]) for a, b in matches):
            for pair in _exchanged(leaders[first], leaders[second]):
                mine[first, second] = pair
    everyone: list[dict[tuple[str, str], tuple[float, float]]] = [{} for _ in facts]
    dist.all_gather_object(everyone, mine)
    found = {hosts: pair for one in everyone for hosts, pair in one.items()}
    return tuple(HostPair(*hosts, *found[hosts]) for hosts in itertools.combinations(leaders, 2))


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ``count`` players in rounds in which nobody plays twice: the circle method of tournaments."""
    even = count + count % 2
    ring = list(range(even))
    for _ in range(even - 1):
        pairs = zip(ring[: even // 2], reversed(ring[even // 2 :]), strict=True)
        # Of an odd number, the one who would play the last rests.
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _exchanged(first: int, second: int) -> Iterator[tuple[float, float]]:
    """(bytes per second, seconds of an empty message), as ``first`` measured them; nothing on other ranks."""
    rank = dist.get_rank()
    if rank not in (first, second):
        return
    other, leads = first + second - rank, rank == first
    large, small = (_round_trip(size, other, leads) for size in (_MESSAGE, 4))
    if leads:
        yield _MESSAGE / max(large / 2 - small / 2, 1e-9), small / 2


def _round_trip(size: int, other: int, leads: bool) -> float:
    """Seconds until a message of ``size`` bytes has come back; the median of some."""
    buffer, seconds = torch.zeros(size // 4), []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for send in (leads, not leads):
            if send:
                dist.send(buffer, other)
            else:
                dist.recv(buffer, other)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
