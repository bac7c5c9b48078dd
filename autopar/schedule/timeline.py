"""Timelines of steps: when each pipeline rank does what. Simulated and measured steps have the same form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from autopar.files import FileName, write_text

Lane = Literal["compute", "communication"]


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time: ``name`` (the text form of an action, for instance) ran on ``rank`` from ``start`` to ``end``, in
    seconds since the step began. Spans of one rank and lane may overlap only in the lane ``communication``."""

    rank: int
    name: str
    kind: str
    start: float
    end: float
    lane: Lane = "compute"

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step on ``stages`` ranks. ``memory[rank]``: (seconds, bytes held from then on), ascending in
    time; empty if memory was not recorded."""

    stages: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    name: str = "step"

    @property
    def seconds(self) -> float:
        """Seconds from the start of the step to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds that ``rank`` computes."""
        return sum(span.seconds for span in self.spans if span.rank == rank and span.lane == "compute")

    @property
    def idle_fraction(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        total = self.seconds * self.stages
        return 1 - sum(self.busy(rank) for rank in range(self.stages)) / total if total else 0.0

    def peak_bytes(self, rank: int) -> float:
        """The most bytes that ``rank`` held; 0 if memory was not recorded."""
        return max((held for _, held in self.memory[rank]), default=0.0) if self.memory else 0.0

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline in Chrome's trace event format (``chrome://tracing``, Perfetto): a process per rank, a thread
        per lane, times in microseconds, memory as a counter. The result is plain data that JSON can hold."""
        events: list[dict[str, Any]] = []
        for rank in range(self.stages):
            events.append(_named("process_name", rank, 0, f"rank {rank}"))
            events += [_named("thread_name", rank, lane, name) for name, lane in _LANES.items()]
        events += [_complete_event(span) for span in self.spans]
        for rank, held in enumerate(self.memory):
            events += [_counter(rank, seconds, count) for seconds, count in held]
        return {"displayTimeUnit": "ms", "otherData": {"name": self.name}, "traceEvents": events}

    def save_chrome_trace(self, path: FileName) -> None:
        """Writes :meth:`to_chrome_trace` to ``path``, a local path or a URL. Raises :class:`OptionsError`."""
        write_text(path, json.dumps(self.to_chrome_trace(), allow_nan=False) + "\n")


# The thread id of each lane.
_LANES: dict[Lane, int] = {"compute": 0, "communication": 1}
# Chrome's trace format counts microseconds.
_MICRO = 1e6


def _named(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}


def _complete_event(span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": _LANES[span.lane],
        "ts": span.start * _MICRO,
        "dur": span.seconds * _MICRO,
    }


def _counter(rank: int, seconds: float, held: float) -> dict[str, Any]:
    return {"ph": "C", "name": "memory", "pid": rank, "ts": seconds * _MICRO, "args": {"bytes": held}}
