"""The timeline of a step as shapes: one lane for each pipeline rank, or one of computing and one of messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.plans.views.quantities import duration, share
from autopar.schedule.timeline import Span, Timeline

# Units of the width, of which a browser makes what the window has. Chosen: about the pixels of a page.
WIDTH = 1000
# Columns of all lanes together: each is drawn in the colour of what takes most of its time. Chosen: less than half a
# megabyte for the worst timeline, and half a unit for up to 32 lanes.
_COLUMNS = 64_000
# Columns of one lane. Chosen: two for each unit of the picture's width.
_MOST_COLUMNS = 2000
# Heights of a lane for few and for many of them. Chosen: numbers fit into the first; 64 of the second fit on a screen.
_TALL, _LOW, _FEW = 22, 10, 16
# Labels of lanes. Chosen: as many as can be told apart.
_MOST_LABELS = 16
# Numbers of microbatches are drawn where they fit. Chosen: two digits of 10 units.
_LEAST_NUMBERED = 14
# Of these numbers. Chosen: about a hundred kilobytes.
_MOST_NUMBERS = 1500
# The word for each kind of span, and the class of its colour.
KINDS = {
    "forward": ("forward", "a"),
    "input_gradient": ("backward of inputs", "d"),
    "weight_gradient": ("backward of weights", "c"),
    "backward": ("backward", "c"),
    "reduce": ("gradients reduced", "b"),
    "step": ("optimizer", "e"),
    "compute": ("computing", "a"),
    "optimizer": ("optimizer", "e"),
    "reshard": ("resharding", "b"),
    "exchange": ("exchanging rows", "b"),
    "weight": ("weights gathered", "d"),
    "gradient": ("gradients reduced", "c"),
    "refresh": ("weights refreshed", "f"),
    "offload": ("to the device and back", "g"),
    "swap": ("to the host and back", "g"),
}


@dataclass(frozen=True)
class Strip:
    """Everything of one kind in a lane: a path of rectangles."""

    css: str
    path: str
    title: str


@dataclass(frozen=True)
class PictureLane:
    """A lane: ``label`` is "" where there is no room; ``numbers``: (x, text) of microbatches."""

    label: str
    y: float
    height: float
    strips: tuple[Strip, ...]
    numbers: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class TimelinePicture:
    """The picture; ``ticks``: (x, text) of the axis of time; ``key``: (class, word) of each kind; ``about``: a sentence
    that says what is to be seen."""

    width: float
    height: float
    lanes: tuple[PictureLane, ...]
    ticks: tuple[tuple[float, str], ...]
    key: tuple[tuple[str, str], ...]
    about: str


def timeline_picture(timeline: Timeline) -> TimelinePicture:
    """The picture of ``timeline``."""
    rows = list(_rows(timeline))
    tall = _TALL if len(rows) <= _FEW else _LOW
    columns = min(_MOST_COLUMNS, _COLUMNS // max(1, len(rows)))
    every = -(-len(rows) // _MOST_LABELS)
    numbered = sum(len(spans) for _, spans in rows) <= _MOST_NUMBERS and tall == _TALL
    lanes = tuple(
        PictureLane(
            label=label if position % every == 0 else "",
            y=position * (tall + 2),
            height=tall,
            strips=tuple(_strips(label, spans, timeline.seconds, columns, tall)),
            numbers=tuple(_numbers(spans, timeline.seconds)) if numbered else (),
        )
        for position, (label, spans) in enumerate(rows)
    )
    seen = dict.fromkeys(span.kind for _, spans in rows for span in spans)
    key = tuple(dict.fromkeys((KINDS[kind][1], KINDS[kind][0]) for kind in KINDS if kind in seen))
    return TimelinePicture(WIDTH, len(rows) * (tall + 2), lanes, tuple(_ticks(timeline.seconds)), key, _about(timeline))


def _rows(timeline: Timeline) -> Iterator[tuple[str, list[Span]]]:
    if timeline.stages == 1 and not timeline.memory:
        for label, lane in (("computes", "compute"), ("sends", "communication")):
            if spans := [span for span in timeline.spans if span.lane == lane]:
                yield label, spans
        return
    for rank in range(timeline.stages):
        yield f"stage {rank}", [span for span in timeline.spans if span.rank == rank and span.kind in KINDS]


def _about(timeline: Timeline) -> str:
    seconds = duration(timeline.seconds)
    if timeline.stages == 1:
        return f"A step of {seconds}: what is computed, and what is sent"
    idle = [1 - timeline.busy(rank) / timeline.seconds for rank in range(timeline.stages)] if timeline.seconds else [0]
    return (
        f"A step of {seconds} on {timeline.stages} stages: they do not compute for {min(idle):.0%} to {max(idle):.0%} "
        f"of it, {timeline.idle_fraction:.0%} on average"
    )


def _strips(label: str, spans: Sequence[Span], seconds: float, columns: int, height: float) -> Iterator[Strip]:
    """The rectangles of each kind. A column belongs to the kind that takes most of it, or to none if more than half of
    it is idle."""
    kinds = list(dict.fromkeys(span.kind for span in spans))
    if not kinds or seconds <= 0:
        return
    taken = np.zeros((len(kinds) + 1, columns + 1))
    for span in spans:
        _add(taken[kinds.index(span.kind)], span.start / seconds * columns, span.end / seconds * columns)
    taken[-1] = 0.5
    winner = taken.argmax(axis=0)[:columns]
    edges = np.flatnonzero(np.diff(winner, prepend=-1, append=-1))
    unit = WIDTH / columns
    for index, kind in enumerate(kinds):
        own = [span.seconds for span in spans if span.kind == kind]
        path = "".join(
            f"M{_short(start * unit)} 0h{_short((end - start) * unit)}v{height:g}h-{_short((end - start) * unit)}z"
            for start, end in itertools.pairwise(edges)
            if winner[start] == index
        )
        word, css = KINDS[kind]
        title = f"{label}: {word}, {duration(sum(own))} ({share(sum(own), seconds)}) in {len(own)} pieces"
        yield Strip(css, path, title)


def _add(row: np.ndarray, start: float, end: float) -> None:
    """Adds a span to the columns that it covers, in columns."""
    first, last = int(start), int(end)
    if first == last:
        row[first] += end - start
        return
    row[first] += first + 1 - start
    row[first + 1 : last] += 1.0
    row[last] += end - last


def _numbers(spans: Sequence[Span], seconds: float) -> Iterator[tuple[float, str]]:
    """The microbatches of what is computed, from the text form of actions (``F0.3`` is microbatch 3 of chunk 0)."""
    for span in spans:
        number = span.name.rpartition(".")[2]
        if span.lane == "compute" and number.isdigit() and span.seconds / seconds * WIDTH >= _LEAST_NUMBERED:
            yield round((span.start + span.end) / 2 / seconds * WIDTH, 1), number


def _ticks(seconds: float) -> Iterator[tuple[float, str]]:
    """A quarter of the step each."""
    for quarter in range(5):
        yield WIDTH * quarter / 4, duration(seconds * quarter / 4)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
