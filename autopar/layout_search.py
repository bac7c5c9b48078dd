"""The best layout of many: every way to divide devices into tensor, pipeline and data ranks, microbatches, chunks, and
experts among data ranks.

A candidate is billed from sections that all candidates of the same tensor degree and microbatch share, so that each
placement program is solved once; it is then ranked by a bound of its step (the busiest rank and the filling of the
pipeline), and the best few are simulated. Planning time therefore grows neither with layers (equal ones are one) nor
with devices (only with the ways to divide them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .cluster import Cluster
from .errors import InfeasibleError, OptionsError
from .layout import Layout, Recompute
from .layout_model import LayoutModel
from .layout_price import Priced, Quick, quick_price
from .layout_sections import Sections
from .plan_units import size

# Microbatches and chunks per stage that are tried, and how many candidates are simulated.
MICROBATCHES = (1, 2, 4)
CHUNKS = (1, 2, 3, 4, 6, 8)
SIMULATED = 8
# How many times as many devices are tried where nothing fits.
FACTORS = (2, 4, 8, 16, 32, 64, 128, 256)
ONE = Layout()
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "elementwise", "full")


@dataclass(frozen=True)
class Space:
    """The values that are tried of each field of a layout; an empty field has those of planning: tensor ranks within a
    node, stages and data ranks that divide the devices, :data:`MICROBATCHES`, :data:`CHUNKS`, every recomputation,
    ZeRO-1 over data ranks (planning itself takes :data:`PLANNED`), and the sequence divided among tensor ranks.
    ``microbatches``: how many a data rank computes in a step."""

    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    microbatch: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    interleave: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()
    zero: tuple[Literal[0, 1, 2, 3], ...] = ()


ANY = Space()
# What planning tries: weights divided too, where gathering them again and again pays.
PLANNED = Space(zero=(1, 3))


@dataclass(frozen=True)
class Found:
    """The best layouts of ``considered``, of which ``fitting`` fit, best first; ``gap``: the largest that a placement
    program among them was solved to."""

    ranked: tuple[Priced, ...]
    considered: int
    fitting: int
    gap: float
    rule: Priced | None

    @property
    def best(self) -> Priced:
        return self.ranked[0]


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def candidates(
    devices: int, batch: int, layers: int, node: int, experts: int = 0, like: Layout = ONE, space: Space = ANY
) -> Iterator[Layout]:
    """Layouts of so many devices within ``space``; a model's ``experts`` are divided in every way. What is not searched
    is as ``like`` has it, and values that do not go with it are left out. Raises :class:`OptionsError` if none do."""
    refused, found = list[OptionsError](), False
    for values in _values(devices, batch, layers, node, experts, like, space):
        try:
            layout = replace(like, **values)
        except OptionsError as error:
            refused = refused or [error]
            continue
        found = True
        yield layout
    if refused and not found:
        raise refused[0]


def _values(
    devices: int, batch: int, layers: int, node: int, experts: int, like: Layout, space: Space
) -> Iterator[dict[str, Any]]:
    """The fields that are searched, of each layout."""
    ranks = devices // like.context
    for tensor in space.tensor or (t for t in divisors(ranks) if node % t == 0):
        for pipeline in space.pipeline or (
            p for p in divisors(ranks) if p <= max(1, layers) or like.cuts == "operations"
        ):
            data = ranks // (tensor * pipeline)
            if data * tensor * pipeline * like.context != devices or (space.data and data not in space.data):
                continue
            for microbatch in _microbatches(batch, data, space):
                for expert in space.expert or expert_degrees(experts, tensor, data):
                    if (data * like.context) % expert == 0:
                        degrees = {"tensor": tensor, "pipeline": pipeline, "data": data, "expert": expert}
                        count, ranks_of_states = batch // (data * microbatch), data * like.context
                        for more in _variants(tensor, pipeline, ranks_of_states, count, layers, space):
                            yield {**degrees, "microbatch": microbatch, **more}


def _microbatches(batch: int, data: int, space: Space) -> list[int]:
    """The sizes of microbatches into which each of ``data`` ranks divides its part of the batch."""
    if batch % data:
        return []
    mine = batch // data
    sizes = space.microbatch or (divisors(mine) if space.microbatches else MICROBATCHES)
    return [s for s in sizes if mine % s == 0 and (not space.microbatches or mine // s in space.microbatches)]


def expert_degrees(experts: int, tensor: int, data: int) -> list[int]:
    """Among how many of ``data`` ranks so many experts can be divided, of which each tensor rank has its own."""
    held = experts // tensor if experts % tensor == 0 else experts
    return divisors(math.gcd(held, data)) if held else [1]


def _variants(
    tensor: int, pipeline: int, sharing: int, count: int, layers: int, space: Space
) -> Iterator[dict[str, Any]]:
    """The other fields where ``sharing`` ranks have the same weights and compute ``count`` microbatches each."""
    divides = space.sequence_parallel or (True,)
    for interleave in space.interleave or CHUNKS:
        # Embedding and head may be the whole of the first and of the last chunk.
        chunked = pipeline > 1 and pipeline * interleave <= layers + 2 and count >= pipeline
        if interleave > 1 and not chunked:
            continue
        for recompute in space.recompute or RECOMPUTE:
            for sequence in divides if tensor > 1 else (False,):
                for zero in (space.zero or (1,)) if sharing > 1 else (0,):
                    yield {
                        "interleave": interleave,
                        "recompute": recompute,
                        "sequence_parallel": sequence,
                        "zero": zero,
                    }


def tried_layouts(
    model: LayoutModel, cluster: Cluster, devices: int, *, batch: int, like: Layout = ONE, space: Space = ANY
) -> list[Quick]:
    """All layouts of ``space`` that divide the model, each with a bound of its step and its memory. Placement programs
    are solved once for all of them that share one, and are remembered by the model."""
    layers, node = len(model.depth.standing), node_size(cluster, devices)
    return [
        quick
        for layout in candidates(devices, batch, layers, node, model.experts, like, space)
        for quick in _quick(model, layout, cluster, batch, space.recompute or RECOMPUTE)
    ]


def quickest_layouts(
    model: LayoutModel, cluster: Cluster, tried: Sequence[Quick], batch: int, limit: int | None = None
) -> list[Priced]:
    """Those of ``tried`` that fit and have the least bounds, simulated, the quickest first; empty if none fits."""
    fitting = [one for one in tried if one.peak <= (limit or one.limit)]
    priced = _simulated(model, cluster, sorted(fitting, key=lambda one: one.seconds), batch, limit)
    return sorted(priced, key=lambda one: one.predicted.step_seconds)


@dataclass(frozen=True)
class _Search:
    """What a search is about; ``limit``: bytes of memory, None: what the device has."""

    model: LayoutModel
    cluster: Cluster
    batch: int
    limit: int | None
    like: Layout
    space: Space

    def tried(self, devices: int, space: Space | None = None, like: Layout | None = None) -> list[Quick]:
        """As :func:`tried_layouts`, elsewhere if so asked."""
        space, like = space or self.space, like or self.like
        return tried_layouts(self.model, self.cluster, devices, batch=self.batch, like=like, space=space)

    def quickest(self, tried: Sequence[Quick]) -> list[Priced]:
        return quickest_layouts(self.model, self.cluster, tried, self.batch, self.limit)

    def fitting(self, tried: Sequence[Quick]) -> int:
        return sum(one.peak <= (self.limit or one.limit) for one in tried)


def best_layout(
    model: LayoutModel,
    cluster: Cluster,
    devices: int,
    *,
    batch: int,
    limit: int | None = None,
    like: Layout = ONE,
    space: Space = PLANNED,
) -> Found:
    """The quickest layout that fits, and beside it the rule of thumb (:func:`rule_of_thumb`). What is not searched
    (precision, overlap, offload) is as ``like`` has it. Where the largest microbatches are the quickest, larger ones
    are tried too, as long as they are quicker still.

    Raises:
        InfeasibleError: none fits; says what would, in bytes.
    """
    search = _Search(model, cluster, batch, limit, like, space)
    tried = search.tried(devices)
    if not tried:
        raise InfeasibleError(_nothing_divides(search, devices))
    priced = search.quickest(tried)
    if not priced:
        raise InfeasibleError(_nothing_fits(search, devices, tried))
    while larger := _larger_microbatches(search, devices, priced[0].layout):
        found = search.quickest(larger)
        tried += larger
        if not found or found[0].predicted.step_seconds >= priced[0].predicted.step_seconds:
            break
        priced = sorted([*priced, *found], key=lambda one: one.predicted.step_seconds)[:SIMULATED]
    gap = max(placed.gap for placed in model.every_placed)
    rule = rule_of_thumb(model, cluster, devices, batch=batch, limit=limit, like=like)
    return Found(tuple(priced), len(tried), search.fitting(tried), gap, rule)


def _larger_microbatches(search: _Search, devices: int, best: Layout) -> list[Quick]:
    """Layouts like the best with microbatches twice as large, if its are the largest that were tried."""
    if search.space.microbatch or search.space.microbatches or best.microbatch < MICROBATCHES[-1]:
        return []
    space = replace(search.space, tensor=(best.tensor,), pipeline=(best.pipeline,), expert=(best.expert,))
    return search.tried(devices, replace(space, microbatch=(2 * best.microbatch,)))


def _simulated(
    model: LayoutModel, cluster: Cluster, ranked: list[Quick], batch: int, limit: int | None
) -> list[Priced]:
    """The first few that fit on every pipeline rank, not only on those that :func:`quick_price` looks at."""
    found: list[Priced] = []
    for one in ranked:
        try:
            priced = model.price(one.layout, cluster, batch, limit)
        except OptionsError:
            continue  # A rank that was not looked at has more states than the host has room for.
        if priced.fits:
            found.append(priced)
        if len(found) == SIMULATED:
            break
    return found


def node_size(cluster: Cluster, devices: int) -> int:
    """Devices that the innermost link joins, at most 8 of them: more never share one layer in practice."""
    inner = cluster.links[0].size or devices
    return math.gcd(min(inner, 8), devices)


def _quick(
    model: LayoutModel, layout: Layout, cluster: Cluster, batch: int, recomputed: Sequence[Recompute] = ()
) -> Iterator[Quick]:
    """None for a layout that cannot be had, or is the same as one with another recomputation that is tried too."""
    try:
        sections = model.sections(layout, cluster, batch)
        same = _comes_to(layout.recompute, sections)
        if same == layout.recompute or same not in recomputed:
            yield quick_price(sections, layout, batch, cluster)
    except OptionsError:
        return


def _comes_to(recompute: Recompute, sections: Sections) -> Recompute:
    """The least recomputation that is the same in these sections: a kernel of attention keeps nothing of its inside."""
    if recompute == "elementwise" and not any(section.saved_remade for section in sections.every):
        recompute = "selective"
    if recompute == "selective" and not any(section.saved_inside for section in sections.every):
        recompute = "none"
    return recompute


def rule_of_thumb(
    model: LayoutModel, cluster: Cluster, devices: int, *, batch: int, limit: int | None = None, like: Layout = ONE
) -> Priced | None:
    """Tensor ranks: the devices of a node; pipeline: the fewest stages that fit; data: the rest. Layers are computed
    again, microbatches of one sample, experts divided among as many data ranks as they can be. None if no number of
    stages fits."""
    layers, tensor = len(model.depth.standing), node_size(cluster, devices)
    for pipeline in (p for p in divisors(devices // tensor) if p <= max(1, layers)):
        data = devices // (tensor * pipeline)
        layout = replace(
            like,
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert_degrees(model.experts, tensor, data)[-1],
            recompute="full",
            sequence_parallel=tensor > 1,
            zero=1 if data > 1 else 0,
        )
        for quick in _quick(model, layout, cluster, batch):
            if quick.peak <= (limit or quick.limit):
                return model.price(layout, cluster, batch, limit)
    return None


def _nothing_divides(search: _Search, devices: int) -> str:
    """Why no layout can even be priced: the batch, or what the first one was refused for."""
    model, cluster, batch = search.model, search.cluster, search.batch
    layers, node = len(model.depth.standing), node_size(cluster, devices)
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


def _nothing_fits(search: _Search, devices: int, tried: Sequence[Quick]) -> str:
    """What would fit, each tried by the same search: whoever follows it finds what is said."""
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


def _more_devices(search: _Search, devices: int) -> Iterator[str]:
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


def _leanest(search: _Search, tried: Sequence[Quick]) -> Quick:
    return min(tried, key=lambda one: one.peak - (search.limit or one.limit))


def _verdict(search: _Search, tried: Sequence[Quick]) -> str:
    """Of the quickest layout that fits, else of the leanest."""
    if found := search.quickest(tried):
        return _which_fits(found[0])
    leanest = _leanest(search, tried)
    return f"{_takes(leanest.peak, leanest.layout)}, which does not fit either"


def _which_fits(priced: Priced) -> str:
    return f"{_takes(priced.predicted.peak_bytes, priced.layout)}, which fits"


def _takes(peak: int, layout: Layout) -> str:
    return f"{size(peak)} ({peak} bytes) as {layout}"


def _elsewhere(search: _Search) -> Iterator[tuple[str, Layout, Sequence[int]]]:
    """Where optimizer states may rest, and how many times as many devices are tried."""
    yield "", search.like, FACTORS
    if search.cluster.device.has_host and not search.like.offload:
        offloaded = " and optimizer states offloaded to the host (offload=True)"
        yield offloaded, replace(search.like, offload=True), (1, *FACTORS)
