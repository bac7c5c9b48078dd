"""Which messages of a step may be sent while it computes, and how much of them.

A *window* is computation that overlaps communication. Each pass through a graph, or through a chunk of it, has a
forward and a backward, which overlap the gathers of the weights they need; a gather starts one weight ahead of its use
(:mod:`autopar.passes.lower.overlap`). The last backward, that of the last microbatch, overlaps reductions of gradients
as
well: a bucket sets out as soon as it is full (:mod:`autopar.passes.lower.reduce_last_microbatch`). All other messages
block
where they are issued: the next computation needs them.

The first gather of a window has nothing to hide behind, nor has the reduction of the last bucket, and while that bucket
is computed there is nothing to reduce yet. So of the messages and of the computing of a window the share of one piece
(the largest parameter, or a bucket) is not counted: what is left is a queue that is never empty and is served while the
window lasts.

Of one backward let G be the seconds of gathers and C of computing, R those of all reductions, g and r the shares of
gathers and reductions that can be hidden. All m backwards of a step together hide

    m g min(G, C) + r (min(G + R, C) - min(G, C))  =  (m g - r) min(G, C) + r min(G + R, C)

that is two windows: gathers beside every backward, at a share of g - r/m, and gathers and reductions beside the last,
at r (which is taken as no more than g). Each is a concave function, so that what is exposed is linear rows of the
program (:mod:`autopar.solver.problem`).

Where messages take the processors that compute (:attr:`autopar.cluster.description.Cluster.overlaps` is false) there
are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.ir.node import RECOMPUTED, Phase

from .prices import BUCKET_BYTES, exchanged_bytes

REDUCTIONS = "reductions"
HALVES = ("input_gradient", "weight_gradient")


class Priced(Protocol):
    """A line of a cost breakdown (:class:`autopar.placement.breakdown.CostLine`)."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def seconds(self) -> float: ...
    @property
    def times(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HiddenShares:
    """Which share of messages and computing can be at once: of ``gathers`` of weights with the pass that needs them, of
    ``reductions`` of gradients with the last backward."""

    gathers: float = 0.0
    reductions: float = 0.0


@dataclass(frozen=True, slots=True)
class SectionSeconds:
    """Seconds of a section in one pass: what it computes, and its gathers of weights."""

    computing: float = 0.0
    gathers: float = 0.0

    def __add__(self, other: SectionSeconds) -> SectionSeconds:
        return SectionSeconds(self.computing + other.computing, self.gathers + other.gathers)

    @property
    def overlapped(self) -> float:
        return min(self.gathers, self.computing)

    def hidden_reductions(self, reductions: float) -> float:
        """How many seconds of reductions go beside the computing when gathers have taken their part of it."""
        return min(self.gathers + reductions, self.computing) - self.overlapped


@dataclass(frozen=True, slots=True)
class OverlapWindow:
    """A window: gathers of ``sections``, and where it ``reduces`` all reductions, beside what these compute, ``times``
    in a step; the share ``hidden`` of both is at once."""

    name: str
    sections: tuple[str, ...]
    hidden: float
    times: int
    reduces: bool = False

    @property
    def phase(self) -> Phase:
        return "forward" if self.sections == ("forward",) else "backward"

    def seconds(self, sides: Mapping[str, SectionSeconds], reductions: float) -> float:
        """What a step hides in this window, all its times together."""
        both = sum((sides.get(section, SectionSeconds()) for section in self.sections), SectionSeconds())
        messages = both.gathers + (reductions if self.reduces else 0.0)
        return self.hidden * self.times * min(messages, both.computing)


def hidden_shares(graph: Graph, cluster: Cluster, stages: int = 1) -> HiddenShares:
    """The shares of a graph that so many ``stages`` divide among them: each has a piece with nothing to hide behind."""
    sizes = sorted((int(node.type.bytes) for node in graph.placeholders("param")), reverse=True)
    if not cluster.overlaps or not sizes:
        return HiddenShares()
    gathered = 1.0 - sum(sizes[:stages]) / sum(sizes)
    exchanged = exchanged_bytes(graph)
    reduced = 1.0 - sum(max(size, BUCKET_BYTES) for size in sizes[:stages]) / exchanged if exchanged else 0.0
    return HiddenShares(gathered, min(gathered, max(0.0, reduced)))


def windows_of(graph: Graph, cluster: Cluster, repeats: Repeats) -> tuple[OverlapWindow, ...]:
    """The windows of a step that runs ``graph`` as ``repeats`` says; its sections are its phases."""
    shares, count = hidden_shares(graph, cluster, repeats.stages), repeats.microbatches
    found = (
        OverlapWindow("forward", ("forward",), shares.gathers, count),
        OverlapWindow("backward", ("backward",), shares.gathers - shares.reductions / count, count),
        OverlapWindow(REDUCTIONS, ("backward",), shares.reductions, 1, reduces=True),
    )
    return tuple(window for window in found if window.hidden > 0)


def gather_windows(shares: HiddenShares, microbatches: int, backwards: Sequence[str]) -> tuple[OverlapWindow, ...]:
    """Those of gathers of a chunk's weights; ``backwards`` as of :meth:`.Schedule.weight_gradients`. A backward in
    halves has a window for each."""
    halves = backwards.count("weight_gradient")
    found = (
        OverlapWindow("forward", ("forward",), shares.gathers, microbatches),
        OverlapWindow("backward", HALVES, shares.gathers, len(backwards) - halves),
        *(OverlapWindow(half, (half,), shares.gathers, halves) for half in HALVES),
    )
    return tuple(window for window in found if window.hidden * window.times > 0)


def seconds_of_sections(lines: Iterable[Priced], section_of: Callable[[Priced], str]) -> dict[str, SectionSeconds]:
    """The sides of every section in one pass, from the lines of a cost breakdown. Messages are not taken to be sent
    beside what is recomputed."""
    computing, gathers = Counter[str](), Counter[str]()
    for line in lines:
        if line.kind == "weight":
            gathers[section_of(line)] += line.seconds / line.times  # type: ignore[assignment]
        elif line.kind == "compute" and not line.name.endswith(RECOMPUTED):
            computing[section_of(line)] += line.seconds / line.times  # type: ignore[assignment]
    return {name: SectionSeconds(computing[name], gathers[name]) for name in (*computing, *gathers)}


def hidden_gathers(lines: Sequence[Priced]) -> dict[str, float]:
    """By phase, which share of the gathers of weights the lines that take back hidden seconds take back."""
    sums = Counter[tuple[str, str]]()
    for line in lines:
        if line.name != REDUCTIONS or line.kind != "hidden":
            sums[line.kind, line.phase] += line.seconds  # type: ignore[assignment]
    return {phase: -hidden / sums["weight", phase] for (kind, phase), hidden in sums.items() if kind == "hidden"}
