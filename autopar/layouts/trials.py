"""Tries layouts on a cluster: bounds the step of each, and simulates the most promising."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.layout import Layout, Recompute
from autopar.layouts.sections.section import Sections

from .model import LayoutModel
from .price import Priced, Quick, quick_price
from .space import ANY, ONE, RECOMPUTE, Space, candidates

# How many candidates are simulated.
# Chosen: as many as keep planning within seconds (docs/layouts.md).
SIMULATED = 8


def tried_layouts(
    model: LayoutModel, cluster: Cluster, devices: int, *, batch: int, like: Layout = ONE, space: Space = ANY
) -> list[Quick]:
    """All layouts of ``space`` that divide the model, each with a bound of its step and its memory. A placement program
    that several layouts share is solved once; the model caches it."""
    search = LayoutSearch(model, cluster, batch, None, like, space)
    return search.priced(search.candidates(devices))


def quickest_layouts(
    model: LayoutModel, cluster: Cluster, tried: Sequence[Quick], batch: int, limit: int | None = None
) -> list[Priced]:
    """Simulates the layouts of ``tried`` that fit and have the lowest bounds. Returns them quickest first; empty if
    none fits."""
    fitting = [quick for quick in tried if quick.fits(limit)]
    priced = _simulated(model, cluster, sorted(fitting, key=lambda quick: quick.seconds), batch, limit)
    return sorted(priced, key=lambda layout: layout.predicted.step_seconds)


@dataclass(frozen=True)
class LayoutSearch:
    """The inputs of a search; ``limit``: bytes of memory per device, None: what the device has."""

    model: LayoutModel
    cluster: Cluster
    batch: int
    limit: int | None
    like: Layout
    space: Space

    def tried(self, devices: int, space: Space | None = None, like: Layout | None = None) -> list[Quick]:
        """:func:`tried_layouts` on so many devices, with another ``space`` or ``like`` if given."""
        other = replace(self, space=space or self.space, like=like or self.like)
        return other.priced(other.candidates(devices))

    def candidates(self, devices: int) -> Iterator[Layout]:
        """The layouts of the space on so many devices."""
        layers, node = len(self.model.depth.priced_as), node_size(self.cluster, devices)
        return candidates(devices, self.batch, layers, node, self.model.experts, self.like, self.space)

    def priced(self, layouts: Iterable[Layout]) -> list[Quick]:
        """The quick prices of those layouts that divide the model."""
        recomputed = self.space.recompute or RECOMPUTE
        every = (quick_layout(self.model, layout, self.cluster, self.batch, recomputed) for layout in layouts)
        return list(chain.from_iterable(every))

    def quickest(self, tried: Sequence[Quick]) -> list[Priced]:
        return quickest_layouts(self.model, self.cluster, tried, self.batch, self.limit)

    def fits(self, quick: Quick) -> bool:
        return quick.fits(self.limit)

    def fitting(self, tried: Sequence[Quick]) -> int:
        return sum(map(self.fits, tried))


def _simulated(
    model: LayoutModel, cluster: Cluster, ranked: list[Quick], batch: int, limit: int | None
) -> list[Priced]:
    """The first few that fit on every pipeline rank, not only on those that :func:`quick_price` checks."""
    fitting: list[Priced] = []
    for quick in ranked:
        try:
            priced = model.price(quick.layout, cluster, batch, limit)
        except OptionsError:
            continue  # A rank that quick_price does not check has more states than the host has room for.
        if priced.fits:
            fitting.append(priced)
        if len(fitting) == SIMULATED:
            break
    return fitting


def node_size(cluster: Cluster, devices: int) -> int:
    """Devices that the innermost link joins, at most 8 of them: more never share one layer in practice."""
    inner = cluster.links[0].size or devices
    return math.gcd(min(inner, 8), devices)


def quick_layout(
    model: LayoutModel, layout: Layout, cluster: Cluster, batch: int, recomputed: Sequence[Recompute] = ()
) -> Iterator[Quick]:
    """The quick price of a layout: one, or none if the model cannot be divided so, or if the layout is equivalent to
    one with another recomputation of ``recomputed``, which is tried too."""
    try:
        sections = model.sections(layout, cluster, batch)
        equivalent = _least_equivalent(layout.recompute, sections)
        if equivalent == layout.recompute or equivalent not in recomputed:
            yield quick_price(sections, layout, batch, cluster)
    except OptionsError:
        return


def _least_equivalent(recompute: Recompute, sections: Sections) -> Recompute:
    """The least recomputation equivalent to ``recompute`` in these sections: a fused attention kernel saves nothing of
    its inside."""
    if recompute == "elementwise" and not any(section.saved_rematerialised for section in sections.every):
        recompute = "selective"
    if recompute == "selective" and not any(section.saved_inside for section in sections.every):
        recompute = "none"
    return recompute
