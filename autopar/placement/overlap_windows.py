"""Which messages of a step may overlap computation, and how much of them.

A *window* is computation that overlaps communication. Each pass through a graph, or through a chunk of it, has a
forward and a backward, which overlap the gathers of the weights they need. A gather starts one weight ahead of its use
(:mod:`autopar.passes.lower.overlap`). The backward of the last microbatch also overlaps reductions of gradients: a
bucket is sent as soon as it is full (:mod:`autopar.passes.lower.reduce_last_microbatch`). All other messages block
where they are issued, because the next computation needs them.

The first gather of a window overlaps nothing, and neither does the reduction of the last bucket. While the first bucket
fills, there is nothing to reduce yet. So the share of one piece (the largest parameter, a message of small ones, or a
bucket) of the messages and of the computation of a window is not counted. The rest is a queue that is never empty and
is served while the window lasts.

For one backward, let G be the seconds of gathers and C those of computation, R those of all reductions, and g and r the
shares of gathers and reductions that can be hidden. Messages slow computing down meanwhile, so of M seconds
H(M) = min((1 - taken) M, C) are hidden (:mod:`autopar.cost.overlap`). All m backwards of a step together hide

    m g H(G) + r (H(G + R) - H(G))  =  (m g - r) H(G) + r H(G + R)

These are two windows: gathers during every backward, with share g - r/m, and gathers and reductions during the last
backward, with share r (which is limited to g). Each is a concave function, so the exposed seconds are linear rows of
the program (:mod:`autopar.solver.problem`).

If messages occupy the processors that compute (:attr:`autopar.cluster.description.Cluster.overlaps` is false), there
are no windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.cluster.description import Cluster
from autopar.cost.overlap import hidden_seconds, taken_by_messages
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.ir.node import RECOMPUTED, Phase
from autopar.ir.weight_messages import WeightMessages

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
class SectionSeconds:
    """Seconds of a section in one pass: its computation, and its gathers of weights."""

    computing: float = 0.0
    gathers: float = 0.0

    def __add__(self, other: SectionSeconds) -> SectionSeconds:
        return SectionSeconds(self.computing + other.computing, self.gathers + other.gathers)


@dataclass(frozen=True, slots=True)
class HiddenShares:
    """The shares of messages and computation that can overlap: of ``gathers`` of weights, with the pass that needs
    them; of ``reductions`` of gradients, with the last backward. ``taken``: the share of the processors that messages
    occupy."""

    gathers: float = 0.0
    reductions: float = 0.0
    taken: float = 0.0

    def of_gathers(self, section: SectionSeconds) -> float:
        """Seconds of a section's gathers that overlap its computation."""
        return self.gathers * hidden_seconds(section.computing, section.gathers, self.taken)

    def of_reductions(self, section: SectionSeconds, reductions: float) -> float:
        """Seconds of reductions that overlap the part of a section's computation that gathers do not overlap."""
        both, gathers = (
            hidden_seconds(section.computing, messages, self.taken)
            for messages in (section.gathers + reductions, section.gathers)
        )
        return self.reductions * (both - gathers)


@dataclass(frozen=True, slots=True)
class OverlapWindow:
    """A window: gathers of ``sections``, and all reductions if it ``reduces``, overlap the computation of the sections,
    ``times`` times in a step. ``hidden``: the share of both that overlaps; ``taken``: as of :class:`HiddenShares`."""

    name: str
    sections: tuple[str, ...]
    hidden: float
    times: int
    reduces: bool = False
    taken: float = 0.0

    @property
    def phase(self) -> Phase:
        return "forward" if self.sections == ("forward",) else "backward"

    def seconds(self, sides: Mapping[str, SectionSeconds], reductions: float) -> float:
        """Seconds that a step hides in this window, summed over all its ``times``."""
        both = sum((sides.get(section, SectionSeconds()) for section in self.sections), SectionSeconds())
        messages = both.gathers + (reductions if self.reduces else 0.0)
        return self.hidden * self.times * hidden_seconds(both.computing, messages, self.taken)


def hidden_shares(graph: Graph, cluster: Cluster, stages: int = 1) -> HiddenShares:
    """The shares of a graph that is divided among ``stages``. Each stage has a piece that overlaps nothing."""
    sizes = graph.once(hidden_shares, lambda: [int(node.type.bytes) for node in graph.placeholders("param")])
    messages = WeightMessages.of(graph)
    message = min(messages.limit, max(messages.small.values(), default=0))
    return shares_of_sizes(sizes, exchanged_bytes(graph), cluster, stages, message)


def shares_of_sizes(
    sizes: Iterable[int], exchanged: int, cluster: Cluster, stages: int = 1, message: int = 0
) -> HiddenShares:
    """The shares of parameters of ``sizes`` bytes, of whose gradients ``exchanged`` bytes are reduced; neither is
    sharded. ``message``: the bytes of those that are gathered together."""
    largest = sorted(sizes, reverse=True)
    if not cluster.overlaps or not sum(largest):
        return HiddenShares()
    gathered = max(0.0, 1.0 - sum(max(size, message) for size in largest[:stages]) / sum(largest))
    reduced = 1.0 - sum(max(size, BUCKET_BYTES) for size in largest[:stages]) / exchanged if exchanged else 0.0
    return HiddenShares(gathered, min(gathered, max(0.0, reduced)), taken_by_messages(cluster))


def windows_of(graph: Graph, cluster: Cluster, repeats: Repeats) -> tuple[OverlapWindow, ...]:
    """The windows of a step that runs ``graph`` as ``repeats`` says. Its sections are the phases."""
    shares, count = hidden_shares(graph, cluster, repeats.stages), repeats.microbatches
    windows = (
        OverlapWindow("forward", ("forward",), shares.gathers, count, taken=shares.taken),
        OverlapWindow("backward", ("backward",), shares.gathers - shares.reductions / count, count, taken=shares.taken),
        OverlapWindow(REDUCTIONS, ("backward",), shares.reductions, 1, reduces=True, taken=shares.taken),
    )
    return tuple(window for window in windows if window.hidden > 0)


def gather_windows(shares: HiddenShares, microbatches: int, backwards: Sequence[str]) -> tuple[OverlapWindow, ...]:
    """The windows for gathers of a chunk's weights. ``backwards``: the result of :meth:`.Schedule.weight_gradients`. A
    split backward has a window for each half."""
    halves = backwards.count("weight_gradient")
    kinds: tuple[tuple[str, tuple[str, ...], int], ...] = (
        ("forward", ("forward",), microbatches),
        ("backward", HALVES, len(backwards) - halves),
        *((half, (half,), halves) for half in HALVES),
    )
    windows = (
        OverlapWindow(name, sections, shares.gathers, times, taken=shares.taken) for name, sections, times in kinds
    )
    return tuple(window for window in windows if window.hidden * window.times > 0)


def seconds_of_sections(lines: Iterable[Priced], section_of: Callable[[Priced], str]) -> dict[str, SectionSeconds]:
    """The seconds of every section in one pass, from the lines of a cost breakdown. Messages are assumed not to overlap
    recomputation. Exchanges inside of an operation count as its computation."""
    computing, gathers = Counter[str](), Counter[str]()
    for line in lines:
        if line.kind == "weight":
            gathers[section_of(line)] += line.seconds / line.times  # type: ignore[assignment]
        elif line.kind in ("compute", "exchange") and not line.name.endswith(RECOMPUTED):
            computing[section_of(line)] += line.seconds / line.times  # type: ignore[assignment]
    return {name: SectionSeconds(computing[name], gathers[name]) for name in (*computing, *gathers)}


def hidden_gathers(lines: Sequence[Priced]) -> dict[str, float]:
    """By phase, the share of the seconds of weight gathers that the hidden lines subtract."""
    sums = Counter[tuple[str, str]]()
    for line in lines:
        if line.name != REDUCTIONS or line.kind != "hidden":
            sums[line.kind, line.phase] += line.seconds  # type: ignore[assignment]
    return {phase: -hidden / sums["weight", phase] for (kind, phase), hidden in sums.items() if kind == "hidden"}
