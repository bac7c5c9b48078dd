"""Fits levels of links, and algorithms of collectives, to what the processes of a job measured.

The algorithms that a library uses are inferred. For each family of algorithms, every kind of collective is fitted on
groups inside hosts and on groups between hosts, by the formulas with which plans are priced
(:mod:`autopar.cost.collective.algorithms`). The chosen family is the one that also explains the groups that span both,
on which none was fitted.
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

# No particular library (a hierarchical algorithm), gloo as autopar uses it, and NCCL.
FAMILIES: tuple[tuple[str, ...], ...] = ((), ("direct",), ("ring",), ("ring", "tree"))
# A family replaces an earlier one if its error is at most this share of the earlier one's.
# Chosen, not measured.
BETTER = 0.9
# Processes share adapters if a gather is quicker by more than this factor with only one process of each host at work.
# Chosen: between 1 (adapters of their own) and 2 (two processes share one), and nearer to 1 because rates scatter.
SHARING = 1.2
# How often the quickest algorithms are chosen and the rate is fitted again.
# Chosen: it only ends fits that oscillate; most stop earlier because the algorithms no longer change.
TURNS = 8
# The least seconds per byte of any link.
TINY = 1e-14

Fitted = Mapping[str, tuple[Rate, ...]]


@dataclass(frozen=True)
class FittedLinks:
    """The fitted links. ``errors``: mean absolute relative errors by level and kind, and, as ``across``, that of groups
    that span hosts and the processes in them, which were not fitted."""

    links: tuple[Link, ...]
    algorithms: tuple[str, ...]
    errors: Mapping[str, float]


def fit_kind(kind: str, samples: Sequence[CollectiveSample], algorithms: Sequence[str]) -> tuple[Rate, float]:
    """Fits the rate of one kind on one level. Returns it and the remaining mean absolute relative error. Of the routes
    that a library has, the quickest counts. Which one that is depends on the rate and on the size of the tensor, so
    rates are fitted and routes chosen in turns."""
    nbytes, seconds = np.array([float(s.nbytes) for s in samples]), np.array([s.seconds for s in samples])
    possible = [_routes(kind, s.members, algorithms) for s in samples]
    chosen, rate = [0] * len(samples), Rate(0.0, 1.0)
    for _ in range(TURNS):
        steps, share = np.array([options[k] for options, k in zip(possible, chosen, strict=True)]).T
        moved = share * nbytes
        features = np.array([np.ones_like(nbytes), steps, moved, 2.0 * np.sqrt(moved)]).T
        rate = _rate(nonnegative_fit(features, seconds))
        prices = [
            [_price(rate, *route, size) for route in options] for options, size in zip(possible, nbytes, strict=True)
        ]
        before, chosen = chosen, [int(np.argmin(of_sample)) for of_sample in prices]
        if chosen == before:
            break
    return rate, float(np.mean(np.abs(np.array([min(of_sample) for of_sample in prices]) / seconds - 1.0)))


def _routes(kind: str, members: int, algorithms: Sequence[str]) -> list[tuple[float, float]]:
    """For each route of ``kind``, its steps and the bytes that each device sends per byte of the full tensor."""
    fan = float(members)

    def lines(rate: Rate) -> list[Line]:
        link = Link("", None, 1.0, 0.0, {kind: (rate,)})
        return [phases[0][0] for phases in routes(kind, (Level(link, fan, 1.0, 1.0, (fan,)),), algorithms)]

    slow, narrow = lines(Rate(1.0, math.inf)), lines(Rate(0.0, 1.0))
    return [(steps, share) for (steps, _, _), (_, share, _) in zip(slow, narrow, strict=True)]


def _rate(weights: Floats) -> Rate:
    """The :class:`~autopar.cluster.links.Rate` with these weights of 1, steps, bytes and twice the root of bytes."""
    start, latency, slope, root = map(float, weights)
    # If bytes only count by their root, the bandwidth is unknown.
    slope = max(slope, TINY)
    return Rate(latency, 1.0 / slope, 1.0, start, root**2 / slope)


def _price(rate: Rate, steps: float, share: float, nbytes: float) -> float:
    moved = share * nbytes / rate.bandwidth
    return rate.start + rate.latency * steps + moved + 2.0 * math.sqrt(rate.ramp * moved)


def fit_messages(samples: Sequence[LinkSample]) -> tuple[Rate, float]:
    """Fits the rate of messages. Returns it and the remaining mean absolute relative error."""
    seconds = np.array([s.seconds for s in samples])
    features = np.array([[1.0, float(s.nbytes)] for s in samples])
    latency, slope = map(float, nonnegative_fit(features, seconds))
    error = float(np.mean(np.abs(features @ (latency, slope) / seconds - 1.0)))
    return Rate(latency, 1.0 / max(slope, TINY)), error


def fit_links(samples: Sequence[LinkSample], shape: JobShape, device: Device) -> FittedLinks:
    """Fits links to ``samples``. ``device`` is only needed to describe a cluster with them."""
    adapters = shared_adapters(samples, shape)
    best: FittedLinks | None = None
    for algorithms in FAMILIES:
        fitted = _family(samples, shape, device, algorithms, adapters)
        if best is None or _worst(fitted) < BETTER * _worst(best):
            best = fitted
    assert best is not None
    return best


def _worst(fitted: FittedLinks) -> float:
    """The larger of the mean error of fitted groups and that of groups that were not fitted."""
    within = [error for name, error in fitted.errors.items() if name != "across"]
    return max(statistics.fmean(within), fitted.errors.get("across", 0.0))


def shared_adapters(samples: Sequence[LinkSample], shape: JobShape) -> int | None:
    """How many adapters the processes of a host share; None if each process gets as much bandwidth as it does alone."""
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
        on_level = [s for s in samples if s.axes in sets and not s.alone]
        if not on_level:
            continue
        rates, level_errors = _level(on_level, shape, algorithms)
        errors |= {f"{name} {kind}": error for kind, error in level_errors.items()}
        shared = adapters if name == "network" else None
        links.append(_link(name, size, rates, shared, shape.per_host))
    cluster = Cluster("", "", device, tuple(links), algorithms=algorithms)
    across = [s for s in samples if len(s.axes) == len(shape.mesh) and shape.hosts > 1 and shape.per_host > 1]
    across_errors = [
        abs(collective_seconds(cluster, shape.mesh, s.kind, s.axes, s.nbytes) / s.seconds - 1)
        for s in across
        if s.kind != MESSAGE
    ]
    errors |= {"across": statistics.fmean(across_errors)} if across_errors else {}
    return FittedLinks(cluster.links, algorithms, errors)


def _level(
    samples: Sequence[LinkSample], shape: JobShape, algorithms: tuple[str, ...]
) -> tuple[Fitted, dict[str, float]]:
    """Fits the rates of every kind on the level of ``samples``. Returns them and the remaining errors."""
    rates, errors = dict[str, tuple[Rate, ...]](), dict[str, float]()
    for kind in COLLECTIVES:
        of_kind = [s for s in samples if s.kind == kind]
        collectives = [CollectiveSample(kind, shape.members(s.axes), s.nbytes, s.seconds) for s in of_kind]
        rate, errors[kind] = fit_kind(kind, collectives, algorithms)
        rates[kind] = (rate,)
    message, errors[MESSAGE] = fit_messages([s for s in samples if s.kind == MESSAGE])
    return {**rates, MESSAGE: (message,)}, errors


def _link(name: str, size: int, rates: Fitted, adapters: int | None, per_host: int) -> Link:
    """The link with these rates. They were measured per process with all processes at work. If processes share
    adapters, a link's bandwidth is that of one adapter."""
    factor = 1.0 if adapters is None else per_host / adapters
    each = {kind: tuple(replace(r, bandwidth=r.bandwidth * factor) for r in lines) for kind, lines in rates.items()}
    usual = each["all_reduce"][0]
    latency = usual.latency + usual.start
    bandwidth = usual.bandwidth if usual.bandwidth < factor / TINY else each["all_gather"][0].bandwidth
    return Link(name, size, bandwidth, latency, each, adapters=adapters)
