"""Steps and bytes of a collective on each level of links, by algorithm.

In a group of N devices, links of level l join ``f_l`` members (the *fan-out*). Each member consists of
``F_l = f_0 ... f_(l-1)`` devices. ``x`` is 1 for an all-gather or reduce-scatter, 2 for an all-reduce, 1/N for an
all-to-all. The full tensor has one byte.

============  =============================  ====================================  ========
algorithm     steps at level l               bytes each device sends at level l    levels
============  =============================  ====================================  ========
hierarchical  x log2 f_l                     x (f_l - 1) / f_l / F_l               in turn
levels        x (f_l - 1)                    x (f_l - 1) / f_l / F_l               in turn
ring          x (f_l - 1) N / F_(l+1)        x (N - 1) / N / F_l                   at once
tree          2 log2 f_l                     2 / F_l                               at once
nvls          as tree; inside log2 f_0       as tree; two 1 / F_1; inside 1        at once
direct        F_l (f_l - 1), or twice        x (f_l - 1) F_l / N                   at once
============  =============================  ====================================  ========

*hierarchical* (recursive halving and doubling inside, then outside: Thakur, Rabenseifner, Gropp 2005) is assumed for a
library whose algorithms are not known. The others are NCCL's (``src/graph/tuning.cc``, ``src/graph/connect.cc``):

- *ring*: one ring through all devices. It crosses a level once for each of its blocks and for each adapter of a block,
  so that all adapters together carry the traffic of one ring.
- *tree*: double binary trees (Sanders, Speck, Traeff 2009), in which devices send twice the tensor.
- *nvls*: the switch sums and copies, so each device sends its tensor once.
- *direct*: a message to each other device (for an all-reduce, two). All libraries use it for all-to-all, and autopar on
  gloo for everything.
- *levels*: a ring inside each block, then a ring between blocks. A plan can also write it as two collectives.

"At once" means that the tensor is sent in pieces, so that all levels work at the same time and the slowest decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cluster.links import Link, Rate

# (seconds, seconds per byte of the full tensor, seconds per square root of a byte).
Line = tuple[float, float, float]
# Alternatives, of which the quickest counts. The price of each is the sum, over phases, of the largest line.
Route = tuple[tuple[tuple[Line, ...], ...], ...]

BY_KIND = {
    "all_reduce": ("ring", "tree", "nvls", "levels", "direct"),
    "all_gather": ("ring", "levels", "direct"),
    "reduce_scatter": ("ring", "levels", "direct"),
    "all_to_all": ("direct",),
}


@dataclass(frozen=True)
class Level:
    """A level of links that a group uses. It joins ``fan`` members, each of which consists of ``inner`` devices of the
    group. ``share``: of a rate's bandwidth, for each device. ``dims``: the fan-outs by dim of a torus (otherwise only
    ``fan``)."""

    link: Link
    fan: float
    inner: float
    share: float
    dims: tuple[float, ...]

    def bandwidth(self, rate: Rate) -> float:
        """Bytes per second of each device. All dims of a torus carry a part of the tensor."""
        most = rate.bandwidth if rate.algorithm == "nvls" else min(rate.bandwidth, self._to_others)
        return most * self.share * max(1, len(self.dims))

    @property
    def _to_others(self) -> float:
        return self.link.pair_bandwidth * max(1.0, self.fan - 1.0)


def steps(kind: str, fan: float, growth: float = 1.0) -> float:
    """The number of latencies that a collective of this kind takes among ``fan`` devices; logarithmic in ``fan``."""
    return math.pow(math.log2(fan), growth) * (2.0 if kind == "all_reduce" else 1.0)


def traffic(kind: str, fan: float, inner: float = 1.0, members: float | None = None) -> float:
    """Bytes that each device sends at one level per byte of the full tensor. The level joins ``fan`` members, each of
    which consists of ``inner`` of the ``members`` devices of the group (by default all ``fan * inner``)."""
    if kind == "all_to_all":
        members = members or fan * inner
        return (fan - 1) * inner / members / members
    share = (fan - 1) / fan / inner
    return 2 * share if kind == "all_reduce" else share


def routes(kind: str, levels: Sequence[Level], algorithms: Sequence[str]) -> Route:
    """All routes by which a library with ``algorithms`` (empty: not known) may carry out a collective of this kind."""
    if not algorithms:
        return (_hierarchical(kind, levels),)
    names = [name for name in BY_KIND[kind] if name in algorithms or kind == "all_to_all"]
    possible = [route for name in names if (route := _ALGORITHMS[name](kind, levels))]
    return tuple(possible) or (_levels(kind, levels),)


def _line(rate: Rate, level: Level, fixed: float, share: float) -> Line:
    slope = share / level.bandwidth(rate)
    return fixed, slope, 2.0 * math.sqrt(rate.ramp * slope)


def _hierarchical(kind: str, levels: Sequence[Level]) -> tuple[tuple[Line, ...], ...]:
    members = math.prod(level.fan for level in levels)
    phases = []
    for level in levels:
        share = traffic(kind, level.fan, level.inner, members)
        rates = level.link.lines(kind)
        fixed = [rate.start + rate.latency * steps(kind, level.fan, rate.growth) for rate in rates]
        phases.append(tuple(_line(rate, level, f, share) for rate, f in zip(rates, fixed, strict=True)))
    return tuple(phases)


def _hops(level: Level) -> float:
    """Steps of a ring through the members of one block. In a torus, it goes through the dims one after the other, both
    ways."""
    return sum(dim / 2.0 for dim in level.dims) if level.link.torus else level.fan - 1.0


def _levels(kind: str, levels: Sequence[Level]) -> tuple[tuple[Line, ...], ...]:
    twice, phases = 2.0 if kind == "all_reduce" else 1.0, []
    for level in levels:
        rate = level.link.lines(kind, "ring")[0]
        fixed = rate.start + twice * _hops(level) * rate.latency
        phases.append((_line(rate, level, fixed, traffic(kind, level.fan, level.inner)),))
    return tuple(phases)


def _at_once(
    kind: str, algorithm: str, levels: Sequence[Level], steps: Sequence[float], shares: Sequence[float]
) -> tuple[tuple[Line, ...], ...]:
    """The line of an algorithm whose levels all work at once on pieces of the tensor. Latencies add up; of the bytes,
    those of the slowest level count."""
    rates = [level.link.lines(kind, algorithm)[0] for level in levels]
    fixed = max(rate.start for rate in rates)
    fixed += sum(count * rate.latency for count, rate in zip(steps, rates, strict=True))
    each = zip(rates, levels, shares, strict=True)
    return (tuple(_line(rate, level, fixed, share) for rate, level, share in each),)


def _ring(kind: str, levels: Sequence[Level]) -> tuple[tuple[Line, ...], ...]:
    members = math.prod(level.fan for level in levels)
    twice = 2.0 if kind == "all_reduce" else 1.0
    counts = [twice * _hops(level) * members / (level.inner * level.fan) for level in levels]
    shares = [twice * (members - 1.0) / members / level.inner for level in levels]
    return _at_once(kind, "ring", levels, counts, shares)


def _tree(kind: str, levels: Sequence[Level]) -> tuple[tuple[Line, ...], ...]:
    """Double binary trees. Inner devices of one tree are leaves of the other. Each device sends half of the tensor once
    as a leaf and, as an inner device, once up and twice down."""
    counts = [2.0 * math.log2(level.fan) for level in levels]
    return _at_once(kind, "tree", levels, counts, [2.0 / level.inner for level in levels])


def _nvls(kind: str, levels: Sequence[Level]) -> tuple[tuple[Line, ...], ...]:
    """Reduction in the switch. Empty if the innermost level in use has no switch that can sum."""
    if not any(rate.algorithm == "nvls" for rate in levels[0].link.rates.get(kind, ())):
        return ()
    counts = [math.log2(levels[0].fan), *(2.0 * math.log2(level.fan) for level in levels[1:])]
    return _at_once(kind, "nvls", levels, counts, [1.0, *(_between(level) for level in levels[1:])])


def _between(level: Level) -> float:
    """Bytes that a device sends between nodes in two trees. If there are only two members, each is the root of one tree
    and sends its half once."""
    return min(2.0, level.fan - 1.0) / level.inner


def _direct(kind: str, levels: Sequence[Level]) -> tuple[tuple[Line, ...], ...]:
    members = math.prod(level.fan for level in levels)
    times = {"all_reduce": 2.0, "all_to_all": 1.0 / members}.get(kind, 1.0)
    counts = [max(1.0, times) * level.inner * (level.fan - 1.0) for level in levels]
    shares = [times * (level.fan - 1.0) * level.inner / members for level in levels]
    return _at_once(kind, "direct", levels, counts, shares)


_ALGORITHMS: dict[str, Callable[[str, Sequence[Level]], tuple[tuple[Line, ...], ...]]] = {
    "ring": _ring,
    "tree": _tree,
    "nvls": _nvls,
    "levels": _levels,
    "direct": _direct,
}
