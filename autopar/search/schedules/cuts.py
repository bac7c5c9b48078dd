"""Where to cut: divides the model's forward among pipeline chunks so that the slowest chunk is as quick as possible.

Between adjacent candidates (:func:`autopar.passes.pipeline.cut_candidates`) lies a *segment*. A chunk is a run of
segments. It takes the sum of their seconds, or the seconds that its input takes on the wire if these are more, and
half of the seconds of the messages at its ends, for some of which ranks wait: of cuts that balance computing equally
well, those that fewer bytes cross are better. (So too between chunks of one rank: nothing is sent there, but kernels
end. Without it the best pipeline of GPT-2 on 64 devices was 7% slower.) It holds their parameters and, for each
microbatch in flight, their saved activations. Among all ways to cut n segments into K chunks that fit into memory,
dynamic programming over (chunk, end) finds the one whose slowest chunk takes least, in O(K n^2) (as in PipeDream,
Narayanan et al. 2019, section 3.1). Where devices differ, each chunk has the seconds and the memory of its own, so
slow and small ones get fewer segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.solver.problem import Floats, Ints


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a graph. ``starts``: the forward nodes at which segments 1, 2, ... begin. By segment: ``seconds``
    for one microbatch, forward and backward; ``static`` bytes (parameters, gradients, optimizer state); ``saved`` bytes
    of a microbatch; ``wire``: seconds for which values that cross the segment's start occupy a wire, forward or
    backward (0 for the first). While it runs, a chunk with the segment holds ``working`` bytes for one operation, and
    ``again`` bytes of what it recomputes; empty: not known."""

    starts: tuple[str, ...]
    seconds: Floats
    static: Floats
    saved: Floats
    wire: Floats
    working: Floats = field(default_factory=lambda: np.zeros(0))
    again: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def count(self) -> int:
        return len(self.seconds)

    @cached_property
    def of_chunks(self) -> tuple[Floats, Floats, Floats, Floats]:
        """``[i, j]``, of a chunk of segments i to j - 1: its seconds, or those of its input on the wire if they are
        more, with its half of all messages; its static bytes, those it saves, and those with which it runs."""
        wire = np.append(self.wire, 0.0)
        seconds = np.maximum(_between(self.seconds), wire[:, None]) + 0.5 * (wire[:, None] + wire)
        running = _most(self.working, self.count) + _most(self.again, self.count)
        return seconds, _between(self.static), _between(self.saved), running


def best_cuts(
    segments: Sequence[Segments],
    in_flight: tuple[int, ...],
    limits: Sequence[float],
    ranks: Ints | None = None,
    allowed: Ints | None = None,
    sharing: int = 1,
) -> tuple[str, ...] | None:
    """The nodes at which chunks 1, 2, ... begin, or None if no cut into as many chunks exists that fit.

    Args:
        segments: by chunk, the segments as priced on its devices.
        in_flight: by chunk, the microbatches that it holds.
        limits: by chunk, the bytes that it may hold.
        ranks: the pipeline rank of each chunk.
        allowed: for each segment, the rank that must hold it (-1: any).
        sharing: how many chunks of a rank share the bytes in which one of them runs.
    """
    chunks, count = len(in_flight), segments[0].count
    if chunks > count:
        return None
    best = np.full((chunks + 1, count + 1), np.inf)
    best[0, 0] = -np.inf
    came = np.zeros((chunks + 1, count + 1), dtype=np.int64)
    known: dict[object, Floats] = {}
    for chunk in range(1, chunks + 1):
        priced, held, limit = segments[chunk - 1], in_flight[chunk - 1], limits[chunk - 1]
        key = id(priced), held, limit
        if key not in known:  # Many chunks are alike.
            known[key] = _chunk_costs(priced, held, limit, sharing)
        cost = known[key]
        if ranks is not None and allowed is not None:
            cost = np.where(_misplaced(allowed, int(ranks[chunk - 1])), np.inf, cost)
        slowest = np.maximum(best[chunk - 1][:, None], cost)
        came[chunk] = slowest.argmin(axis=0)
        best[chunk] = slowest[came[chunk], np.arange(count + 1)]
    if not np.isfinite(best[chunks, count]):
        return None
    ends, end = [], count
    for chunk in range(chunks, 1, -1):
        end = int(came[chunk, end])
        ends.append(end)
    return tuple(segments[0].starts[end - 1] for end in reversed(ends))


def _chunk_costs(segments: Segments, in_flight: int, limit: float, sharing: int) -> Floats:
    """``[i, j]``: seconds of a chunk of segments i to j - 1, infinite if it is empty or too large."""
    seconds, static, saved, running = segments.of_chunks
    held = static + in_flight * saved + running / sharing
    possible = np.triu(np.ones_like(seconds, dtype=bool), 1) & (held <= limit)
    return np.where(possible, seconds, np.inf)


def _between(part: Floats) -> Floats:
    """``[i, j]``: the sum of entries i to j - 1."""
    total = np.concatenate([[0.0], np.cumsum(part)])
    sums: Floats = total[None, :] - total[:, None]
    return sums


def _most(part: Floats, count: int) -> Floats:
    """``[i, j]``: the largest of entries i to j - 1 of ``count``; 0 if they are not known."""
    known = part if len(part) else np.zeros(count)
    rows = np.triu(np.tile(np.concatenate([[0.0], known]), (count + 1, 1)), 1)
    largest: Floats = np.maximum.accumulate(rows, axis=1)
    return largest


def _misplaced(allowed: Ints, rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """``[i, j]``: whether some segment from i to j - 1 must be on another rank than ``rank``."""
    elsewhere = ((allowed >= 0) & (allowed != rank)).astype(np.float64)
    return _between(elsewhere) > 0
