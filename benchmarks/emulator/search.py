"""The best layout of a space (:mod:`.space`), and the rule of thumb it is compared with.

Candidates with the same tensor degree and microbatch share priced sections, so that each placement program is solved
once. They are ranked by a bound of their step (the busiest rank, and filling the pipeline), and the best few are
simulated. Planning time therefore grows neither with layers (equal layers are priced once) nor with devices (only with
the ways to divide them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError
from autopar.layout import Layout, divisors

from .infeasible import nothing_divides, nothing_fits
from .model import LayoutModel
from .price import Priced, Quick
from .space import MICROBATCHES, ONE, PLANNED, Space, expert_degrees
from .trials import SIMULATED, LayoutSearch, node_size


@dataclass(frozen=True)
class LayoutSearchResult:
    """The best layouts, best first. ``tried``: all that were priced; ``fitting``: how many of these fit; ``gap``: the
    largest optimality gap of their placement programs."""

    ranked: tuple[Priced, ...]
    tried: tuple[Quick, ...]
    fitting: int
    gap: float
    rule: Priced | None

    @property
    def best(self) -> Priced:
        return self.ranked[0]

    @property
    def considered(self) -> int:
        return len(self.tried)


def best_layout(
    model: LayoutModel,
    cluster: Cluster,
    devices: int,
    *,
    batch: int,
    limit: int | None = None,
    like: Layout = ONE,
    space: Space = PLANNED,
) -> LayoutSearchResult:
    """The quickest layout that fits, and the rule of thumb to compare it with (:func:`rule_of_thumb`).

    Fields that are not searched (precision, overlap, offload) are taken from ``like``. Where the largest microbatches
    are the quickest, larger ones are tried too, as long as they are quicker still.

    Raises:
        InfeasibleError: none fits; says what would fit, in bytes.
    """
    search = LayoutSearch(model, cluster, batch, limit, like, space)
    tried = search.tried(devices)
    priced = search.quickest(tried)
    if not tried:
        raise InfeasibleError(nothing_divides(search, devices))
    if not priced:
        raise InfeasibleError(nothing_fits(search, devices, tried))
    while larger := _larger_microbatches(search, devices, priced[0].layout):
        quicker = search.quickest(larger)
        tried += larger
        if not quicker or quicker[0].predicted.step_seconds >= priced[0].predicted.step_seconds:
            break
        priced = sorted([*priced, *quicker], key=lambda layout: layout.predicted.step_seconds)[:SIMULATED]
    gap = max(placed.gap for placed in model.every_placed)
    rule = rule_of_thumb(search, devices)
    return LayoutSearchResult(tuple(priced), tuple(tried), search.fitting(tried), gap, rule)


def _larger_microbatches(search: LayoutSearch, devices: int, best: Layout) -> list[Quick]:
    """Layouts like the best with microbatches twice as large, if the best has the largest that were tried."""
    if search.space.microbatch or search.space.microbatches or best.microbatch < MICROBATCHES[-1]:
        return []
    space = replace(search.space, tensor=(best.tensor,), pipeline=(best.pipeline,), expert=(best.expert,))
    return search.tried(devices, replace(space, microbatch=(2 * best.microbatch,)))


def rule_of_thumb(search: LayoutSearch, devices: int) -> Priced | None:
    """As many tensor ranks as a node has devices, the fewest pipeline stages that fit, and the remaining devices as
    data ranks. Layers are recomputed, microbatches have one sample, and experts are divided among as many data ranks as
    possible. None if no number of stages fits."""
    model = search.model
    layers, tensor = len(model.depth.priced_as), node_size(search.cluster, devices)
    for pipeline in (p for p in divisors(devices // tensor) if p <= max(1, layers)):
        data = devices // (tensor * pipeline)
        layout = replace(
            search.like,
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert_degrees(model.experts, tensor, data)[-1],
            recompute="full",
            sequence_parallel=tensor > 1,
            zero=1 if data > 1 else 0,
        )
        quick = search.quick(layout)
        if quick is not None and search.fits(quick):
            return model.price(layout, search.cluster, search.batch, search.limit)
    return None
