"""Tries layouts on a cluster: bounds the step of each, and simulates the most promising."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.layout import Layout
from benchmarks.emulator.sections.section import Sections

from .model import LayoutModel
from .price import Priced, Quick, quick_price
from .space import ANY, ONE, RECOMPUTE, Recompute, Space, candidates

# How many candidates are simulated.
# Chosen: as many as keep planning within seconds (docs/layouts.md).
SIMULATED = 8


@dataclass(frozen=True)
class LayoutSearch:
    """The inputs of a search. ``limit``: bytes of memory per device, None: what the device has; ``like``: supplies
    every field that is not searched."""

    model: LayoutModel
    cluster: Cluster
    batch: int
    limit: int | None = None
    like: Layout = ONE
    space: Space = ANY

    def tried(self, devices: int, space: Space | None = None, like: Layout | None = None) -> list[Quick]:
        """All layouts on so many devices that divide the model, each with a bound of its step and its memory; of
        another ``space`` or ``like`` if given. A placement program that several layouts share is solved once; the model
        caches it."""
        other = replace(self, space=space or self.space, like=like or self.like)
        return other.priced(other.candidates(devices))

    def candidates(self, devices: int) -> Iterator[Layout]:
        """The layouts of the space on so many devices."""
        layers, node = len(self.model.depth.priced_as), node_size(self.cluster, devices)
        return candidates(devices, self.batch, layers, node, self.model.experts, self.like, self.space)

    def priced(self, layouts: Iterable[Layout]) -> list[Quick]:
        """The quick prices of those layouts that divide the model."""
        return list(filter(None, (self.quick(layout, self.space.recompute or RECOMPUTE) for layout in layouts)))

    def quick(self, layout: Layout, recomputed: Sequence[Recompute] = ()) -> Quick | None:
        """The quick price of a layout; None if the model cannot be divided so, or if the layout is equivalent to one
        with another recomputation of ``recomputed``, which is tried too."""
        try:
            sections = self.model.sections(layout, self.cluster, self.batch)
            equivalent = _least_equivalent(layout.recompute, sections)
            if equivalent != layout.recompute and equivalent in recomputed:
                return None
            return quick_price(sections, layout, self.batch, self.cluster)
        except OptionsError:
            return None

    def quickest(self, tried: Sequence[Quick]) -> list[Priced]:
        """Simulates the layouts of ``tried`` that fit and have the lowest bounds. Returns them quickest first; empty if
        none fits."""
        ranked = sorted(filter(self.fits, tried), key=lambda quick: quick.seconds)
        fitting = filter(None, map(self._simulated, ranked))
        return sorted(islice(fitting, SIMULATED), key=lambda layout: layout.predicted.step_seconds)

    def _simulated(self, quick: Quick) -> Priced | None:
        """The price of a layout, if it fits on every pipeline rank, not only on those that :func:`quick_price`
        checks."""
        try:
            priced = self.model.price(quick.layout, self.cluster, self.batch, self.limit)
        except OptionsError:
            return None  # A rank that quick_price does not check has more states than the host has room for.
        return priced if priced.fits else None

    def fits(self, quick: Quick) -> bool:
        return quick.fits(self.limit)

    def fitting(self, tried: Sequence[Quick]) -> int:
        return sum(map(self.fits, tried))


def node_size(cluster: Cluster, devices: int) -> int:
    """Devices that the innermost link joins, at most 8 of them: more never share one layer in practice."""
    inner = cluster.links[0].size or devices
    return math.gcd(min(inner, 8), devices)


def _least_equivalent(recompute: Recompute, sections: Sections) -> Recompute:
    """The least recomputation equivalent to ``recompute`` in these sections: a fused attention kernel saves nothing of
    its inside."""
    if recompute == "elementwise" and not any(section.saved_rematerialised for section in sections.every):
        recompute = "selective"
    if recompute == "selective" and not any(section.saved_inside for section in sections.every):
        recompute = "none"
    return recompute
