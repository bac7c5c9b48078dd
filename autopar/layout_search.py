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
from dataclasses import dataclass, replace
from typing import Literal

from .cluster import Cluster
from .errors import InfeasibleError, OptionsError
from .layout import Layout, Recompute
from .layout_model import LayoutModel
from .layout_price import Priced, Quick, quick_price
from .plan_units import size

# Microbatches and chunks per stage that are tried, and how many candidates are simulated.
MICROBATCHES = (1, 2, 4)
CHUNKS = (1, 2, 3, 4, 6, 8)
SIMULATED = 8
ONE = Layout()
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "elementwise", "full")


@dataclass(frozen=True)
class Space:
    """The values that are tried of each field of a layout; an empty field has those of planning: tensor ranks within a
    node, stages and data ranks that divide the devices, :data:`MICROBATCHES`, :data:`CHUNKS`, every recomputation,
    ZeRO-1 over data ranks, and the sequence divided among tensor ranks. ``microbatches``: how many a data rank computes
    in a step."""

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
    is as ``like`` has it."""
    ranks = devices // like.context
    for tensor in space.tensor or (t for t in divisors(ranks) if node % t == 0):
        for pipeline in space.pipeline or (p for p in divisors(ranks) if p <= layers or like.cuts == "operations"):
            data = ranks // (tensor * pipeline)
            if data * tensor * pipeline * like.context != devices or (space.data and data not in space.data):
                continue
            for microbatch in _microbatches(batch, data, space):
                for expert in space.expert or expert_degrees(experts, tensor, data):
                    if (data * like.context) % expert == 0:
                        base = replace(like, tensor=tensor, pipeline=pipeline, data=data, expert=expert)
                        yield from _variants(replace(base, microbatch=microbatch), batch, layers, space)


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


def _variants(base: Layout, batch: int, layers: int, space: Space) -> Iterator[Layout]:
    count, pipeline = base.microbatches(batch), base.pipeline
    divides = space.sequence_parallel or (True,)
    zeros = (space.zero or (1,)) if base.data * base.context > 1 else (0,)
    for interleave in space.interleave or CHUNKS:
        chunks = pipeline * interleave
        # A layer less on the first and the last stage, where that comes out even: embedding and head take their place.
        even = pipeline > 1 and layers % chunks != 0 and (layers + 2) % chunks == 0
        ends = int(even and not base.lead and not base.tail)
        chunked = pipeline > 1 and chunks <= layers + 2 * ends and count >= pipeline
        if interleave > 1 and not chunked:
            continue
        for recompute in space.recompute or RECOMPUTE:
            for sequence in divides if base.tensor > 1 else (False,):
                shared = replace(base, interleave=interleave, recompute=recompute, sequence_parallel=sequence)
                shared = replace(shared, lead=ends, tail=ends) if ends else shared
                yield from (replace(shared, zero=zero) for zero in zeros)


def tried_layouts(
    model: LayoutModel, cluster: Cluster, devices: int, *, batch: int, like: Layout = ONE, space: Space = ANY
) -> list[Quick]:
    """All layouts of ``space`` that divide the model, each with a bound of its step and its memory. Placement programs
    are solved once for all of them that share one, and are remembered by the model."""
    layers, node = len(model.depth.standing), node_size(cluster, devices)
    return [
        quick
        for layout in candidates(devices, batch, layers, node, model.experts, like, space)
        for quick in _quick(model, layout, cluster, batch)
    ]


def quickest_layouts(
    model: LayoutModel, cluster: Cluster, tried: Sequence[Quick], batch: int, limit: int | None = None
) -> list[Priced]:
    """Those of ``tried`` that fit and have the least bounds, simulated, the quickest first; empty if none fits."""
    fitting = [one for one in tried if one.peak <= (limit or one.limit)]
    priced = _simulated(model, cluster, sorted(fitting, key=lambda one: one.seconds), batch, limit)
    return sorted(priced, key=lambda one: one.predicted.step_seconds)


def best_layout(
    model: LayoutModel, cluster: Cluster, devices: int, *, batch: int, limit: int | None = None, like: Layout = ONE
) -> Found:
    """The quickest layout that fits, and beside it the rule of thumb (:func:`rule_of_thumb`). What is not searched
    (precision, overlap, offload) is as ``like`` has it.

    Raises:
        InfeasibleError: none fits; says what would, in bytes.
    """
    tried = tried_layouts(model, cluster, devices, batch=batch, like=like)
    priced = quickest_layouts(model, cluster, tried, batch, limit)
    if not priced:
        raise InfeasibleError(_nothing_fits(model, cluster, tried, batch, limit))
    gap = max(placed.gap for placed in model.every_placed)
    fitting = sum(one.peak <= (limit or one.limit) for one in tried)
    rule = rule_of_thumb(model, cluster, devices, batch=batch, limit=limit, like=like)
    return Found(tuple(priced), len(tried), fitting, gap, rule)


def _simulated(
    model: LayoutModel, cluster: Cluster, ranked: list[Quick], batch: int, limit: int | None
) -> list[Priced]:
    """The first few that fit on every pipeline rank, not only on those that :func:`quick_price` looks at."""
    found: list[Priced] = []
    for one in ranked:
        priced = model.price(one.layout, cluster, batch, limit)
        if priced.fits:
            found.append(priced)
        if len(found) == SIMULATED:
            break
    return found


def node_size(cluster: Cluster, devices: int) -> int:
    """Devices that the innermost link joins, at most 8 of them: more never share one layer in practice."""
    inner = cluster.links[0].size or devices
    return math.gcd(min(inner, 8), devices)


def _quick(model: LayoutModel, layout: Layout, cluster: Cluster, batch: int) -> Iterator[Quick]:
    try:
        sections = model.sections(layout, cluster)
        if layout.recompute == "selective" and not any(section.saved_inside for section in sections.every):
            return  # The same as without: attention is one kernel, which keeps nothing of its inside.
        if layout.recompute == "elementwise" and not any(section.saved_remade for section in sections.every):
            return
        yield quick_price(sections, layout, batch, cluster)
    except OptionsError:
        return


def rule_of_thumb(
    model: LayoutModel, cluster: Cluster, devices: int, *, batch: int, limit: int | None = None, like: Layout = ONE
) -> Priced | None:
    """Tensor ranks: the devices of a node; pipeline: the fewest stages that fit; data: the rest. Layers are computed
    again, microbatches of one sample, experts divided among as many data ranks as they can be. None if no number of
    stages fits."""
    layers, tensor = len(model.depth.standing), node_size(cluster, devices)
    for pipeline in (p for p in divisors(devices // tensor) if p <= layers):
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


def _nothing_fits(model: LayoutModel, cluster: Cluster, tried: list[Quick], batch: int, limit: int | None) -> str:
    if not tried:
        return f"a batch of {batch} does not divide among any of the layouts; try another batch"
    leanest = min(tried, key=lambda one: one.peak)
    allowed = limit or leanest.limit
    said = [
        f"no layout fits into {size(allowed)} ({allowed} bytes) per device: the leanest, {leanest.layout}, takes "
        f"{size(leanest.peak)} ({leanest.peak} bytes)"
    ]
    for what, layout in _savings(leanest.layout):
        for quick in _quick(model, layout, cluster, batch * layout.data // leanest.layout.data):
            verdict = "fits" if quick.peak <= allowed else "does not fit either"
            said.append(f"{what}: {size(quick.peak)} ({quick.peak} bytes), which {verdict}")
    return ". ".join(said)


def _savings(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """What would take less memory, beginning with what costs least."""
    if layout.recompute != "full":
        yield "With recompute='full'", replace(layout, recompute="full")
    if layout.microbatch > 1:
        yield "With microbatches of 1", replace(layout, microbatch=1)
    yield "With optimizer states offloaded to the host", replace(layout, offload=True)
    yield "With zero=3", replace(layout, zero=3)
    for factor in (2, 4, 8):
        grown = replace(layout, data=layout.data * factor, zero=3)
        yield f"With {grown.devices} devices and zero=3", grown
