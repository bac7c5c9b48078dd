"""What to say where no layout can be had, or none fits: what would, found by the same search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.plans.views.quantities import size

from .price import Priced, Quick
from .space import PLANNED, Space, candidates
from .trials import LayoutSearch, node_size

# How many times as many devices are tried where nothing fits.
# Chosen: doubling ends soon, and nobody has more than 256 times as many at hand.
FACTORS = (2, 4, 8, 16, 32, 64, 128, 256)


def nothing_divides(search: LayoutSearch, devices: int) -> str:
    """Why no layout can even be priced: the batch, or what the first one was refused for."""
    model, cluster, batch = search.model, search.cluster, search.batch
    layers, node = len(model.depth.priced_as), node_size(cluster, devices)
    first = next(candidates(devices, batch, layers, node, model.experts, search.like, search.space), None)
    if first is not None:
        try:
            model.price(first, cluster, batch)
        except OptionsError as error:
            return f"no layout of {devices} devices can be had: {error}"
    works = math.ceil(batch / devices) * devices
    return (
        f"a batch of {batch} does not divide among the data ranks of any layout of {devices} devices whose stages have "
        f"a layer each; a batch of {works} does"
    )


def nothing_fits(search: LayoutSearch, devices: int, tried: Sequence[Quick]) -> str:
    """What would fit. Each piece of advice was tried by the same search, so following it gives what it says."""
    leanest = _leanest(search, tried)
    allowed = search.limit or leanest.limit
    said = [
        f"no layout fits into {size(allowed)} ({allowed} bytes) per device: the leanest, {leanest.layout}, takes "
        f"{size(leanest.peak)} ({leanest.peak} bytes)"
    ]
    fixed = [one.name for one in fields(Space) if getattr(search.space, one.name) != getattr(PLANNED, one.name)]
    if fixed and (freed := search.tried(devices, PLANNED)):
        said.append(f"With {' and '.join(fixed)} left out: {_verdict(search, freed)}")
    return ". ".join([*said, *_more_devices(search, devices)])


def _more_devices(search: LayoutSearch, devices: int) -> Iterator[str]:
    """The least number of devices with which something fits, all else as it was asked for; no more are tried once twice
    as many need no less memory each."""
    for what, like, factors in _elsewhere(search):
        least: float = math.inf
        for factor in factors:
            tried = search.tried(devices * factor, like=like)
            if found := search.quickest(tried):
                yield f"With {devices * factor} devices{what}: {_which_fits(found[0])}"
                break
            peak = min((one.peak for one in tried), default=math.inf)
            if least <= peak and least < math.inf:
                break
            least = peak


def _leanest(search: LayoutSearch, tried: Sequence[Quick]) -> Quick:
    return min(tried, key=lambda one: one.peak - (search.limit or one.limit))


def _verdict(search: LayoutSearch, tried: Sequence[Quick]) -> str:
    """Of the quickest layout that fits, else of the leanest."""
    if found := search.quickest(tried):
        return _which_fits(found[0])
    leanest = _leanest(search, tried)
    return f"{_takes(leanest.peak, leanest.layout)}, which does not fit either"


def _which_fits(priced: Priced) -> str:
    return f"{_takes(priced.predicted.peak_bytes, priced.layout)}, which fits"


def _takes(peak: int, layout: Layout) -> str:
    return f"{size(peak)} ({peak} bytes) as {layout}"


def _elsewhere(search: LayoutSearch) -> Iterator[tuple[str, Layout, Sequence[int]]]:
    """Where optimizer states may rest, and how many times as many devices are tried."""
    yield "", search.like, FACTORS
    if search.cluster.device.has_host and not search.like.offload:
        offloaded = " and optimizer states offloaded to the host (offload=True)"
        yield offloaded, replace(search.like, offload=True), (1, *FACTORS)
