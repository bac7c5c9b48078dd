"""Measures the links between the processes of a job, on one or several hosts, all of them at once.

It measures every kind of collective at every message size, in groups inside a host, between hosts and across both;
messages to a neighbour; and the largest gather between hosts with one process of each host at work, which shows how
many adapters the processes of a host share.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autopar.cluster.links import MESSAGE
from autopar.ir.program import COLLECTIVES
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.groups import AxisGroup, MeshGroups

from .measure_process import MESSAGE_BYTES, agree, collective_call, halved, rate_of_all

# Chosen: from where latency decides to where bandwidth does.
GPU_MESSAGE_BYTES = (64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
# Chosen: odd, so that the median is one of them.
ROUNDS = 5
# Chosen: ends the rounds of small messages, whose mean is steady by then.
MOST_REPEATS = 100
# Larger messages of a kind are left out if one took this much longer than its part of the time.
# Chosen: the time that one slow kind may add to the requested seconds.
PATIENCE_SECONDS = 2.0


@dataclass(frozen=True)
class JobShape:
    """A job of ``per_host`` processes on each of ``hosts`` hosts. The ranks of a host are consecutive."""

    hosts: int
    per_host: int

    @property
    def mesh(self) -> tuple[int, ...]:
        """Hosts, then processes of a host. An even number above two becomes (its half, 2), so that smaller groups are
        measured too.

        >>> JobShape(2, 8).mesh
        (2, 4, 2)
        """
        return (*halved(self.hosts), *halved(self.per_host))

    @property
    def inside(self) -> list[tuple[int, ...]]:
        """Axes of groups inside a host, the smallest first."""
        outer = len(halved(self.hosts))
        return [tuple(range(k, len(self.mesh))) for k in range(len(self.mesh) - 1, outer - 1, -1)]

    @property
    def between(self) -> list[tuple[int, ...]]:
        """Axes of groups with one process of each of several hosts."""
        outer = len(halved(self.hosts))
        return [tuple(range(k, outer)) for k in range(outer - 1, -1, -1)]

    def groups(self) -> list[tuple[int, ...]]:
        """Axes of all groups to measure."""
        everyone = [tuple(range(len(self.mesh)))] if self.hosts > 1 and self.per_host > 1 else []
        return [axes for axes in (*self.inside, *self.between, *everyone) if self.members(axes) > 1]

    def members(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.mesh[axis] for axis in axes)


@dataclass(frozen=True)
class LinkSample:
    """A collective over ``axes`` of the mesh of :class:`JobShape` took ``seconds`` until the last process was done.
    ``nbytes``: of the full tensor of a group (:mod:`autopar.cost.collective.collective`) or, for the kind ``message``,
    of what each process sent to the next of its group. ``alone``: only the groups of each host's first process were at
    work."""

    axes: tuple[int, ...]
    kind: str
    nbytes: int
    seconds: float
    alone: bool = False


@dataclass(frozen=True)
class _Trial:
    axes: tuple[int, ...]
    kind: str
    nbytes: int
    alone: bool = False


def _trials(shape: JobShape, sizes: tuple[int, ...]) -> Iterator[_Trial]:
    for axes, kind in itertools.product(shape.groups(), (*COLLECTIVES, MESSAGE)):
        yield from (_Trial(axes, kind, nbytes) for nbytes in sizes)
    if shape.hosts > 1 and shape.per_host > 1:
        yield _Trial(shape.between[-1], "all_gather", sizes[-1], alone=True)


def measure_links(groups: MeshGroups, shape: JobShape, seconds: float) -> tuple[LinkSample, ...]:
    """Measures for about ``seconds``. All processes call this and get the same samples. ``groups``: those of the mesh
    ``shape.mesh``."""
    sizes = MESSAGE_BYTES if groups.device.type == "cpu" else GPU_MESSAGE_BYTES
    wires, started, trials = Collectives(groups), time.perf_counter(), list(_trials(shape, sizes))
    samples, too_slow = list[LinkSample](), set[tuple[tuple[int, ...], str]]()
    for index, trial in enumerate(trials):
        if trial.alone:
            trial = replace(trial, nbytes=_largest(samples, trial))
        elif (trial.axes, trial.kind) in too_slow:
            continue
        function = _function(trial, wires, shape)
        rate_of_all(function, 1, groups.device)
        pilot = rate_of_all(function, 1, groups.device)
        (elapsed,) = agree(time.perf_counter() - started)
        budget = max(0.0, seconds - elapsed) / (len(trials) - index)
        count = min(MOST_REPEATS, max(1, math.ceil(budget / ROUNDS / pilot)))
        times = [rate_of_all(function, count, groups.device) for _ in range(ROUNDS if budget > pilot else 1)]
        samples.append(LinkSample(trial.axes, trial.kind, trial.nbytes, statistics.median(times), trial.alone))
        if pilot > PATIENCE_SECONDS + 4.0 * budget:
            too_slow.add((trial.axes, trial.kind))
    return tuple(samples)


def _largest(samples: Sequence[LinkSample], trial: _Trial) -> int:
    """The largest message that the same groups exchanged, all of them at once."""
    return max(sample.nbytes for sample in samples if (sample.axes, sample.kind) == (trial.axes, trial.kind))


def _function(trial: _Trial, wires: Collectives, shape: JobShape) -> Callable[[], object]:
    group = wires.groups.over(trial.axes)
    if trial.alone and dist.get_rank() % shape.per_host:
        return lambda: None
    if trial.kind == MESSAGE:
        return _message(trial.nbytes, group, wires.groups.device)
    return collective_call(trial.kind, group.size, trial.nbytes, wires, trial.axes)


def _message(nbytes: int, group: AxisGroup, device: torch.device) -> Callable[[], object]:
    """Returns a function that sends a message to the next process of ``group`` and receives one from the process
    before.
    """
    sent, received = (torch.ones(max(1, nbytes // 4), device=device) for _ in range(2))
    following, before = (group.index + 1) % group.size, (group.index - 1) % group.size

    def exchange() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group.group, group_peer=following),
                dist.P2POp(dist.irecv, received, group=group.group, group_peer=before),
            ]
        )
        for work in works:
            work.wait()

    return exchange
