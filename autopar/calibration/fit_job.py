"""Levels of links and algorithms of collectives from what the processes of a job measured.

Which algorithms a library uses is not asked but found: for each family of them every kind of collective is fitted on
groups inside hosts and on groups between hosts, by the very formulas plans are priced with
(:mod:`autopar.cost.collective.algorithms`), and the family counts that also explains the groups across both, which
were fitted by none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster.description import Cluster, Device, Link, Rate
from autopar.cluster.links import MESSAGE
from autopar.cost.collective.algorithms import Level, Line, routes
from autopar.cost.collective.collective import collective_seconds
from autopar.ir.program import COLLECTIVES
from autopar.solver.problem import Floats

from .measure_links import JobShape, LinkSample
from .relative_least_squares import nonnegative_fit
from .samples import CollectiveSample

# Nobody's description (a hierarchical algorithm), gloo as autopar uses it, and NCCL.
FAMILIES: tuple[tuple[str, ...], ...] = ((), ("direct",), ("ring",), ("ring", "tree"))
# A family must explain the samples this much better than one before it.
# Chosen, not measured.
BETTER = 0.9
# Where a gather with one process of a host at work is quicker by more than this, processes share adapters.
# Chosen: between 1 (adapters of their own) and 2 (two processes share one), and nearer to 1 because rates scatter.
SHARING = 1.2
# Turns of choosing the quickest way and fitting again.
# Chosen: it only ends a fit that goes round in circles; most stop earlier because the ways no longer change.
TURNS = 8
# Seconds per byte below which no link is.
TINY = 1e-14

Fitted = Mapping[str, tuple[Rate, ...]]


@dataclass(frozen=True)
class FittedLinks:
    """``errors`` are mean absolute relative ones by level and kind, and ``across`` of groups that span hosts and the
    processes in them, which were not fitted."""

    links: tuple[Link, ...]
    algorithms: tuple[str, ...]
    errors: Mapping[str, float]


def fit_kind(kind: str, samples: Sequence[CollectiveSample], algorithms: Sequence[str]) -> tuple[Rate, float]:
    """The rate of one kind on one level, and the mean absolute relative error that remains. Of several ways of a
    library the quickest counts, which by a rate are different ones for small and large tensors: fitted in turns."""
    nbytes, seconds = np.array([float(s.nbytes) for s in samples]), np.array([s.seconds for s in samples])
    ways = [_way(kind, s.members, algorithms) for s in samples]
    taken, rate = [0] * len(samples), Rate(0.0, 1.0)
    for _ in range(TURNS):
        steps, share = np.array([found[k] for found, k in zip(ways, taken, strict=True)]).T
        moved = share * nbytes
        features = np.array([np.ones_like(nbytes), steps, moved, 2.0 * np.sqrt(moved)]).T
        rate = _rate(nonnegative_fit(features, seconds))
        prices = [[_price(rate, *way, size) for way in found] for found, size in zip(ways, nbytes, strict=True)]
        before, taken = taken, [int(np.argmin(some)) for some in prices]
        if taken == before:
            break
    return rate, float(np.mean(np.abs(np.array([min(some) for some in prices]) / seconds - 1.0)))


def _way(kind: str, members: int, algorithms: Sequence[str]) -> list[tuple[float, float]]:
    """Steps, and bytes each device sends per byte of the full tensor, of each way to carry out ``kind``."""
    fan = float(members)

    def lines(rate: Rate) -> list[Line]:
        link = Link("", None, 1.0, 0.0, {kind: (rate,)})
        return [phases[0][0] for phases in routes(kind, (Level(link, fan, 1.0, 1.0, (fan,)),), algorithms)]

    slow, narrow = lines(Rate(1.0, math.inf)), lines(Rate(0.0, 1.0))
    return [(steps, share) for (steps, _, _), (_, share, _) in zip(slow, narrow, strict=True)]


def _rate(weights: Floats) -> Rate:
    """From the weights of 1, steps, bytes and twice the root of bytes: :class:`~autopar.cluster.links.Rate`."""
    start, latency, slope, root = map(float, weights)
    # Bytes that only count by their root leave no bandwidth to be told.
    slope = max(slope, TINY)
    return Rate(latency, 1.0 / slope, 1.0, start, root**2 / slope)


def _price(rate: Rate, steps: float, share: float, nbytes: float) -> float:
    moved = share * nbytes / rate.bandwidth
    return rate.start + rate.latency * steps + moved + 2.0 * math.sqrt(rate.ramp * moved)


def fit_messages(samples: Sequence[LinkSample]) -> tuple[Rate, float]:
    """The rate of messages, and the mean absolute relative error that remains."""
    seconds = np.array([s.seconds for s in samples])
    features = np.array([[1.0, float(s.nbytes)] for s in samples])
    latency, slope = map(float, nonnegative_fit(features, seconds))
    error = float(np.mean(np.abs(features @ (latency, slope) / seconds - 1.0)))
    return Rate(latency, 1.0 / max(slope, TINY)), error


def fit_links(samples: Sequence[LinkSample], shape: JobShape, device: Device) -> FittedLinks:
    """The links behind ``samples``; ``device`` is only needed to describe a cluster with them."""
    adapters = shared_adapters(samples, shape)
    found: FittedLinks | None = None
    for algorithms in FAMILIES:
        fitted = _family(samples, shape, device, algorithms, adapters)
        if found is None or _worst(fitted) < BETTER * _worst(found):
            found = fitted
    assert found is not None
    return found


def _worst(fitted: FittedLinks) -> float:
    """The mean error of what was fitted, or of what was not, whichever is larger."""
    within = [error for name, error in fitted.errors.items() if name != "across"]
    return max(statistics.fmean(within), fitted.errors.get("across", 0.0))


def shared_adapters(samples: Sequence[LinkSample], shape: JobShape) -> int | None:
    """How many adapters the processes of a host share, None if each has as much alone as with the others."""
    for alone in (sample for sample in samples if sample.alone):
        same = (alone.axes, alone.kind, alone.nbytes)
        together = [s.seconds for s in samples if not s.alone and (s.axes, s.kind, s.nbytes) == same]
        if together and together[0] > SHARING * alone.seconds:
            return max(1, round(shape.per_host * alone.seconds / together[0]))
    return None


def _family(
    samples: Sequence[LinkSample], shape: JobShape, device: Device, algorithms: tuple[str, ...], adapters: int | None
) -> FittedLinks:
    links, errors = [], dict[str, float]()
    spans = (("host", shape.inside, shape.per_host), ("network", shape.between, shape.hosts * shape.per_host))
    for name, sets, size in spans:
        mine = [s for s in samples if s.axes in sets and not s.alone]
        if not mine:
            continue
        rates, left = _level(mine, shape, algorithms)
        errors |= {f"{name} {kind}": error for kind, error in left.items()}
        shared = adapters if name == "network" else None
        links.append(_link(name, size, rates, shared, shape.per_host))
    cluster = Cluster("", "", device, tuple(links), algorithms=algorithms)
    across = [s for s in samples if len(s.axes) == len(shape.mesh) and shape.hosts > 1 and shape.per_host > 1]
    off = [
        abs(collective_seconds(cluster, shape.mesh, s.kind, s.axes, s.nbytes) / s.seconds - 1)
        for s in across
        if s.kind != MESSAGE
    ]
    errors |= {"across": statistics.fmean(off)} if off else {}
    return FittedLinks(cluster.links, algorithms, errors)


def _level(
    samples: Sequence[LinkSample], shape: JobShape, algorithms: tuple[str, ...]
) -> tuple[Fitted, dict[str, float]]:
    """Rates of every kind on the level of ``samples``, and the errors that remain."""
    rates, errors = dict[str, tuple[Rate, ...]](), dict[str, float]()
    for kind in COLLECTIVES:
        mine = [CollectiveSample(kind, shape.members(s.axes), s.nbytes, s.seconds) for s in samples if s.kind == kind]
        rate, errors[kind] = fit_kind(kind, mine, algorithms)
        rates[kind] = (rate,)
    message, errors[MESSAGE] = fit_messages([s for s in samples if s.kind == MESSAGE])
    return {**rates, MESSAGE: (message,)}, errors


def _link(name: str, size: int, rates: Fitted, adapters: int | None, per_host: int) -> Link:
    """Measured was what each process gets with all at work; of shared adapters a link names what one carries."""
    factor = 1.0 if adapters is None else per_host / adapters
    each = {kind: tuple(replace(r, bandwidth=r.bandwidth * factor) for r in lines) for kind, lines in rates.items()}
    usual = each["all_reduce"][0]
    latency = usual.latency + usual.start
    bandwidth = usual.bandwidth if usual.bandwidth < factor / TINY else each["all_gather"][0].bandwidth
    return Link(name, size, bandwidth, latency, each, adapters=adapters)
