"""Measures, in one process, the local disk on which optimizer state may rest (``$AUTOPAR_OFFLOAD``), while all
processes of the machine use it.

What is measured is what a step does: pieces of state pass through the buffers of
:mod:`autopar.runtime.state.disk_visits`, past the page cache. So the figures include the interpreter and the threads,
and reads are measured beside writes, which share the bandwidth of most disks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import OptionsError
from autopar.offload import NVME_PIECE
from autopar.runtime.state.disk import Buffer, DiskState, offload_folder
from autopar.runtime.state.disk_visits import DiskVisits, Visitor
from autopar.runtime.state.optimizer import make_optimizer

from .measure_device import lower_quartile

# Elements of the state that is measured, in fp32, with two moments as Adam has: pieces as large as they get, so that
# the disk sends at its full rate, and such that only starting counts. Chosen.
LARGE, SMALL = NVME_PIECE, 256
# Pieces in a round. Chosen: enough that the first and the last, beside which nothing moves, hardly count.
LARGE_COUNT, SMALL_COUNT = 12, 48
# Of Adam.
MOMENTS = 2
# Chosen: the fewest that have a lower quartile, as of all that is measured here.
LEAST_ROUNDS = 4


@dataclass(frozen=True)
class DiskSample:
    """Seconds of one process: ``large``: to read and write one piece while others are read and written; ``small``: to
    update one small parameter; ``read``, ``write``: of a large piece alone. ``free``: bytes free on the disk."""

    large: float
    small: float
    read: float
    write: float
    free: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> DiskSample:
        return DiskSample(**json.loads(text))


class DiskRounds:
    """What is measured of the disk, round by round; all processes call everything at once, and ``meet`` waits for all.
    Raises :class:`OptionsError` if the folder's disk has too little room."""

    def __init__(self, meet: Callable[[], object]) -> None:
        # Before anything is written: the same on all processes.
        self.meet, self.free = meet, shutil.disk_usage(offload_folder()).free
        needed = 4 * 4 * MOMENTS * (LARGE_COUNT * LARGE + SMALL_COUNT * SMALL)
        if self.free < needed:
            raise OptionsError(
                f"{offload_folder()} has {self.free} bytes free; measuring its disk takes {needed} per process"
            )
        visits, buffer = DiskVisits(), Buffer()
        large = _resting(visits)
        files, piece = [v.files for v in large if v.files is not None], large[0].pieces[0]
        self._tasks: list[tuple[Callable[[], object], int]] = [
            (lambda: visits.step(large), LARGE_COUNT),
            (_small_updates(), SMALL_COUNT),
            (lambda: _each(files, lambda file: file.read(buffer, piece)), LARGE_COUNT),
            (lambda: _each(files, lambda file: file.write(buffer, piece)), LARGE_COUNT),
        ]
        self.taken: list[list[float]] = [[] for _ in self._tasks]
        meet()

    def once(self) -> None:
        """Another round."""
        for (task, count), times in zip(self._tasks, self.taken, strict=True):
            self.meet()
            begin = time.perf_counter()
            task()
            times.append((time.perf_counter() - begin) / count)

    def sample(self, typical: Callable[[Sequence[float]], float] = lower_quartile, last: int = 0) -> DiskSample:
        """All rounds in one, or the ``last`` ones."""
        whole, update, read, write = (typical(times[-last:]) for times in self.taken)
        return DiskSample(whole, update, read, write, self.free)


def measure_disk(seconds: float, meet: Callable[[], object]) -> DiskSample:
    """Measures for about ``seconds``; see :class:`DiskRounds`."""
    rounds = DiskRounds(meet)
    end, goes_on = time.perf_counter() + seconds, True
    while goes_on:
        rounds.once()
        goes_on = _all_agree(len(rounds.taken[0]) < LEAST_ROUNDS or time.perf_counter() < end)
    return rounds.sample()


def _each(files: Sequence[DiskState], move: Callable[[DiskState], None]) -> None:
    for file in files:
        move(file)


def _all_agree(goes_on: bool) -> bool:
    """Whether all processes measure another round."""
    if not dist.is_initialized():
        return goes_on
    wish = torch.tensor(float(goes_on))
    dist.all_reduce(wish, op=dist.ReduceOp.MIN)
    return bool(wish)


def _resting(visits: DiskVisits) -> list[Visitor]:
    """Large pieces of state on the disk, written once: files are slower the first time."""
    shape, state = torch.Size([LARGE]), {f"moment{k}": torch.ones(LARGE) for k in range(MOMENTS)}
    visitors = [Visitor(torch.device("cpu"), shape, lambda piece, given: given) for _ in range(LARGE_COUNT)]
    for visitor in visitors:
        visits.rest(visitor, state)
    return visitors


def _small_updates() -> Callable[[], object]:
    """A step of Adam on small parameters, whose time is that of an update of whatever size: threads, interpreter,
    latency of the disk."""
    parameters = [nn.Parameter(torch.ones(SMALL)) for _ in range(SMALL_COUNT)]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    optimizer, gradient = make_optimizer(torch.optim.AdamW, named, lambda path: "nvme"), torch.ones(SMALL)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = gradient
        optimizer.step()

    step()
    return step


def measure_disk_process(folder: str, rank: int, processes: int, seconds: float) -> None:
    """The main function of a process started by :func:`autopar.calibration.disk.calibrate_disk`: measures, and writes
    ``folder/<rank>.json``."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = f"file://{Path(folder).absolute()}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    try:
        sample = measure_disk(seconds, dist.barrier)
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(sample.to_json())
