"""Error messages where no layout divides the model or none fits: they name layouts that would, found by the same
search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.plans.views.quantities import size

from .price import Priced, Quick
from .space import PLANNED, Space
from .trials import LayoutSearch

# Multiples of the number of devices that are tried where nothing fits.
# Chosen: doubling ends soon, and nobody has more than 256 times as many at hand.
FACTORS = (2, 4, 8, 16, 32, 64, 128, 256)


def nothing_divides(search: LayoutSearch, devices: int) -> str:
    """Why no layout can be priced: the batch, or the error of the first layout."""
    batch, first = search.batch, next(search.candidates(devices), None)
    if first is not None:
        try:
            search.model.price(first, search.cluster, batch)
        except OptionsError as error:
            return f"no layout of {devices} devices is possible: {error}"
    works = math.ceil(batch / devices) * devices
    return (
        f"a batch of {batch} does not divide among the data ranks of any layout of {devices} devices whose stages have "
        f"a layer each; a batch of {works} does"
    )


def nothing_fits(search: LayoutSearch, devices: int, tried: Sequence[Quick]) -> str:
    """What would fit. The same search tried each piece of advice, so it holds."""
    leanest = _leanest(search, tried)
    allowed = search.limit or leanest.limit
    sentences = [
        f"no layout fits into {size(allowed)} ({allowed} bytes) per device: the leanest, {leanest.layout}, takes "
        f"{size(leanest.peak)} ({leanest.peak} bytes)"
    ]
    names = [field.name for field in fields(Space)]
    fixed = [name for name in names if getattr(search.space, name) != getattr(PLANNED, name)]
    if fixed and (freed := search.tried(devices, PLANNED)):
        sentences.append(f"With {' and '.join(fixed)} left out: {_verdict(search, freed)}")
    return ". ".join([*sentences, *_more_devices(search, devices)])


def _more_devices(search: LayoutSearch, devices: int) -> Iterator[str]:
    """The least number of devices with which a layout fits, everything else unchanged. Stops once more devices need no
    less memory each."""
    for offloaded, like, factors in _state_locations(search):
        least: float = math.inf
        for factor in factors:
            tried = search.tried(devices * factor, like=like)
            if fitting := search.quickest(tried):
                yield f"With {devices * factor} devices{offloaded}: {_which_fits(fitting[0])}"
                break
            peak = min((quick.peak for quick in tried), default=math.inf)
            if least <= peak and least < math.inf:
                break
            least = peak


def _leanest(search: LayoutSearch, tried: Sequence[Quick]) -> Quick:
    return min(tried, key=lambda quick: quick.peak - (search.limit or quick.limit))


def _verdict(search: LayoutSearch, tried: Sequence[Quick]) -> str:
    """Describes the quickest layout that fits, else the leanest."""
    if fitting := search.quickest(tried):
        return _which_fits(fitting[0])
    leanest = _leanest(search, tried)
    return f"{_takes(leanest.peak, leanest.layout)}, which does not fit either"


def _which_fits(priced: Priced) -> str:
    return f"{_takes(priced.predicted.peak_bytes, priced.layout)}, which fits"


def _takes(peak: int, layout: Layout) -> str:
    return f"{size(peak)} ({peak} bytes) as {layout}"


def _state_locations(search: LayoutSearch) -> Iterator[tuple[str, Layout, Sequence[int]]]:
    """Where optimizer states may rest: words for it, the layout's fields, and the multiples of devices that are
    tried."""
    yield "", search.like, FACTORS
    if search.cluster.device.has_host and not search.like.offload:
        offloaded = " and optimizer states offloaded to the host (offload=True)"
        yield offloaded, replace(search.like, offload=True), (1, *FACTORS)
