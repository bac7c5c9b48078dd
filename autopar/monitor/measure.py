"""What one rank measures of a step, and what follows from the measurements of all."""

from __future__ import annotations

import resource
import statistics
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The part of a step that others must wait longer than a rank for it to be called a straggler.
# Chosen: ranks of one machine differ by a few per cent.
_NOTABLE = 0.1
_FORMAT = "<dd?d"


@dataclass(frozen=True)
class Measured:
    """One rank's seconds of a step, ``peak`` bytes, and the seconds it waited (None: unknown)."""

    seconds: float
    peak: float
    waiting: float | None

    def to_bytes(self) -> bytes:
        """Of the same length on every rank."""
        return struct.pack(_FORMAT, self.seconds, self.peak, self.waiting is not None, self.waiting or 0.0)

    @staticmethod
    def from_bytes(data: bytes) -> Measured:
        """What :meth:`to_bytes` gave."""
        seconds, peak, known, waiting = struct.unpack(_FORMAT, data)
        return Measured(seconds, peak, waiting if known else None)


def peak_memory(device: torch.device) -> int:
    """The peak so far, in bytes: of allocations on a GPU, else of the resident process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    kibibytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kibibytes


def step_seconds(everyone: Sequence[Measured]) -> float:
    """The median of all ranks'."""
    return statistics.median(one.seconds for one in everyone)


def waiting_seconds(everyone: Sequence[Measured]) -> tuple[float, ...] | None:
    """By rank of the mesh; None if a rank does not know."""
    known = tuple(one.waiting for one in everyone if one.waiting is not None)
    return known if len(known) == len(everyone) else None


def straggler(ranks: Sequence[int], waiting: Sequence[float] | None, seconds: float) -> int | None:
    """The rank that waits least, if the median of the others waits notably longer."""
    if waiting is None or len(waiting) < 2:
        return None
    least = min(range(len(waiting)), key=waiting.__getitem__)
    others = statistics.median(value for index, value in enumerate(waiting) if index != least)
    return ranks[least] if others - waiting[least] > _NOTABLE * seconds else None
