"""Where to cut: divides the model's forward among pipeline chunks so that the slowest chunk is as quick as possible.

Between adjacent candidates (:func:`autopar.passes.pipeline.cut_candidates`) lies a *segment*. A chunk is a run of
segments. It takes the sum of their seconds, or the seconds that its input takes on the wire if these are more, and
half of the seconds of the messages at its ends, for some of which ranks wait: of cuts that balance computing equally
well, those that fewer bytes cross are better. (So too between chunks of one rank: nothing is sent there, but kernels
end. Without it the best pipeline of GPT-2 on 64 devices was 7% slower.) It holds their parameters and, for each
microbatch in flight, their saved activations. Among all ways to cut n segments into K chunks that fit into memory,
dynamic programming over (chunk, end) finds the one whose slowest chunk takes least (as in PipeDream, Narayanan et al.
2019, section 3.1). Long chunks take longer than the slowest of a good cut and are left out, so that this takes about
O(n^2) and not O(K n^2). Where devices differ, each chunk has the seconds and the memory of its own, so
slow and small ones get fewer segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.solver.problem import Floats, Ints

# The segments of the longest chunk that is tried first, at least.
LEAST_WIDTH = 8


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a graph. ``starts``: the forward nodes at which segments 1, 2, ... begin. By segment: ``seconds``
    for one microbatch, forward and backward; ``static`` bytes (parameters, gradients, optimizer state); ``saved`` bytes
    of a microbatch; ``wire``: seconds for which values that cross the segment's start occupy a wire, forward or
    backward (0 for the first). A chunk that begins with the segment holds ``entering`` bytes of a microbatch besides,
    which it receives; one that ends before it ``returning`` bytes of gradients. While it runs, a chunk with the segment
    holds ``working`` bytes for one operation, and ``again`` bytes of what it recomputes. Empty: not known."""

    starts: tuple[str, ...]
    seconds: Floats
    static: Floats
    saved: Floats
    wire: Floats
    entering: Floats = field(default_factory=lambda: np.zeros(0))
    returning: Floats = field(default_factory=lambda: np.zeros(0))
    working: Floats = field(default_factory=lambda: np.zeros(0))
    again: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def count(self) -> int:
        return len(self.seconds)

    def bytes_of(self, start: int, end: int) -> tuple[float, float, float]:
        """Of a chunk of segments ``start`` to ``end - 1``: its static bytes, those of a microbatch in flight, and those
        with which it runs."""
        static, saved = (float(part[start:end].sum()) for part in (self.static, self.saved))
        received = float(self.entering[start : start + 1].sum() + self.returning[end : end + 1].sum())
        running = (float(part[start:end].max(initial=0.0)) for part in (self.working, self.again))
        return static, saved + received, sum(running)

    def rules_out(self, width: int, slowest: float, in_flight: int, limit: float) -> bool:
        """Whether every chunk of more than ``width`` segments takes more than ``slowest`` seconds, or is too large.
        Each contains one of ``width + 1`` segments, which takes no longer and is no larger."""
        seconds, static, saved = (
            total[width + 1 :] - total[: -width - 1] for total in map(_sums, (self.seconds, self.static, self.saved))
        )
        return bool(((seconds > slowest) | (static + in_flight * saved > limit)).all())

    def of_width(self, width: int) -> _Chunks:
        """The chunks of at most so many segments."""
        if width not in self._of_width:
            self._of_width[width] = _Chunks.of(self, width)
        return self._of_width[width]

    @cached_property
    def _of_width(self) -> dict[int, _Chunks]:
        return {}


@dataclass(frozen=True, eq=False)
class _Chunks:
    """All chunks of at most so many segments. ``[j, d]``, of the chunk that ends before segment j and begins at segment
    ``j - width + d``: its ``seconds``, or those of its input on the wire if they are more, with its half of all
    messages (infinite where no segment has that number); its ``static`` bytes, those ``saved`` for a microbatch in
    flight, and those with which it is ``running``."""

    seconds: Floats
    static: Floats
    saved: Floats
    running: Floats

    @staticmethod
    def of(segments: Segments, width: int) -> _Chunks:
        wire = np.append(segments.wire, 0.0)
        first = _before(wire, width, 0.0)
        seconds = np.maximum(_between(segments.seconds, width), first) + 0.5 * (first + wire[:, None])
        seconds[_before(np.zeros(len(wire)), width, 1.0) > 0.0] = np.inf
        running = _most(segments.working, segments.count, width) + _most(segments.again, segments.count, width)
        entering, returning = (_known(part, segments.count) for part in (segments.entering, segments.returning))
        saved = _between(segments.saved, width) + _before(entering, width, 0.0) + returning[:, None]
        return _Chunks(seconds, _between(segments.static, width), saved, running)

    def costs(self, in_flight: int, limit: float, sharing: int) -> Floats:
        """Their seconds; infinite if they are too large."""
        held = self.static + in_flight * self.saved + self.running / sharing
        return self.seconds if limit == np.inf else np.where(held <= limit, self.seconds, np.inf)


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
    width = max(LEAST_WIDTH, 2 * -(-count // chunks))
    while True:
        width = min(width, count)
        slowest, ends = _best_of_width(width, segments, in_flight, limits, ranks, allowed, sharing)
        # None of the longer chunks is part of a cut as good as this.
        each = set(zip(segments, in_flight, limits, strict=True))
        if width == count or all(own.rules_out(width, slowest, held, limit) for own, held, limit in each):
            return None if slowest == np.inf else tuple(segments[0].starts[end - 1] for end in ends)
        width *= 2


def _best_of_width(
    width: int,
    segments: Sequence[Segments],
    in_flight: tuple[int, ...],
    limits: Sequence[float],
    ranks: Ints | None,
    allowed: Ints | None,
    sharing: int,
) -> tuple[float, list[int]]:
    """As :func:`best_cuts`, of chunks of at most ``width`` segments: the seconds of the slowest, infinite if there is
    no such cut, and the segments at which chunks 1, 2, ... begin."""
    count, came = segments[0].count, list[Ints]()
    best = np.where(np.arange(count + 1) == 0, -np.inf, np.inf)
    known: dict[object, Floats] = {}
    for chunk, (priced, held, limit) in enumerate(zip(segments, in_flight, limits, strict=True)):
        key = id(priced), held, limit
        if key not in known:  # Many chunks are alike.
            known[key] = priced.of_width(width).costs(held, limit, sharing)
        cost = known[key]
        if ranks is not None and allowed is not None and (allowed >= 0).any():
            cost = np.where(_misplaced(allowed, int(ranks[chunk]), width), np.inf, cost)
        slowest = np.maximum(_before(best, width, np.inf), cost)
        first = slowest.argmin(axis=1)
        best = slowest[np.arange(count + 1), first]
        came.append(np.arange(count + 1) - width + first)
    ends, end = list[int](), count
    for starts in reversed(came[1:] if best[count] < np.inf else []):
        end = int(starts[end])
        ends.append(end)
    return float(best[count]), ends[::-1]


def _before(part: Floats, width: int, otherwise: float) -> Floats:
    """``[j, d]``: entry ``j - width + d`` of ``part``, one of the ``width`` before entry j; ``otherwise`` if there is
    no such entry."""
    padded = np.concatenate([np.full(width, otherwise), part[:-1]])
    return np.lib.stride_tricks.sliding_window_view(padded, width)


def _sums(part: Floats) -> Floats:
    """The sums of the first 0, 1, ... entries."""
    return np.concatenate([[0.0], np.cumsum(part)])


def _between(part: Floats, width: int) -> Floats:
    """``[j, d]``: the sum of entries ``j - width + d`` to j - 1."""
    total = _sums(part)
    return total[:, None] - _before(total, width, 0.0)


def _most(part: Floats, count: int, width: int) -> Floats:
    """``[j, d]``: the largest of entries ``j - width + d`` to j - 1 of ``count``; 0 if they are not known."""
    from_last = np.maximum.accumulate(_before(_known(part, count), width, 0.0)[:, ::-1], axis=1)
    return from_last[:, ::-1]


def _known(part: Floats, count: int) -> Floats:
    """The ``count`` entries of ``part``, 0 if they are not known, and one more, which is 0."""
    return np.append(part if len(part) else np.zeros(count), 0.0)


def _misplaced(allowed: Ints, rank: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """``[j, d]``: whether some segment from ``j - width + d`` to j - 1 must be on another rank than ``rank``."""
    elsewhere = ((allowed >= 0) & (allowed != rank)).astype(np.float64)
    return _between(elsewhere, width) > 0
