"""The price of a layout: seconds of a step and bytes of every rank, or a quick bound of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cluster.description import Cluster
from autopar.ir.plan_record import Predicted
from autopar.layout import Layout
from benchmarks.emulator.sections.section import Sections, counted
from benchmarks.emulator.step.memory import Held
from benchmarks.emulator.step.pipeline_ranks import chunks_of
from benchmarks.emulator.step.step import LayoutStep

from .hardware import check_hardware, check_offloaded, notes_on
from .pricing import pricing_of


@dataclass(frozen=True)
class Priced:
    """A layout and its price.

    ``predicted``: as of a plan, with the bytes of the fullest pipeline rank. ``held``: the bytes of every rank.
    ``reserved``: bytes that libraries take and fragmentation loses. ``flops``: those of a step's products,
    recomputation excluded. ``parts``: the parts of a step in seconds of the busiest rank. ``notes``: what was assumed
    because the cluster's description omits it."""

    layout: Layout
    batch: int
    cluster: str
    predicted: Predicted
    held: tuple[Held, ...]
    memory_limit: int
    reserved: int
    flops: float
    parts: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.predicted.peak_bytes <= self.memory_limit

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the fullest device exceeds the limit; negative: bytes left free."""
        return self.predicted.peak_bytes - self.memory_limit

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the model per device."""
        return self.flops / self.predicted.step_seconds / self.layout.devices


def price_sections(
    sections: Sections, layout: Layout, batch: int, cluster: Cluster, limit: int | None = None
) -> Priced:
    """The price of a layout whose sections are priced. Raises :class:`OptionsError` if layers, batch or devices cannot
    be divided so."""
    held, step_of = _divided(sections, layout, batch, cluster, range(layout.pipeline))
    step, fullest = step_of(), max(held, key=lambda rank_held: rank_held.total + rank_held.lost)
    seconds = step.seconds()
    reserved = cluster.device.reserve_bytes + fullest.lost
    flops = sum(section.flops for chunk in step.chunks for section in chunk) * step.microbatches * layout.data
    compute, communicate = step.busiest()
    dtype = pricing_of(layout).product_dtype(layout)
    predicted = Predicted(
        step_seconds=seconds,
        compute_seconds=compute,
        comm_seconds=communicate,
        bubble_seconds=_beyond(compute + communicate, seconds),
        peak_bytes=fullest.total,
        weight_bytes=fullest.weights,
        gradient_bytes=fullest.gradients,
        optimizer_bytes=fullest.optimizer,
        activation_bytes=fullest.activations,
        temporary_bytes=fullest.working,
        input_bytes=0,
        mfu=flops / (seconds * layout.devices * cluster.device.flops(dtype)),
    )
    limit = limit or cluster.device.memory_bytes - reserved
    parts, notes = dict(step.parts()), notes_on(layout, dtype, cluster)
    return Priced(layout, batch, cluster.name, predicted, tuple(held), limit, reserved, flops, parts, notes)


def _divided(
    sections: Sections, layout: Layout, batch: int, cluster: Cluster, ranks: Iterable[int]
) -> tuple[list[Held], Callable[[], LayoutStep]]:
    """What some pipeline ranks of a layout hold, and what makes its step."""
    microbatches, pricing = layout.microbatches(batch), pricing_of(layout)
    check_hardware(layout, cluster)
    chunks, memory = pricing.chunks(sections, layout), pricing.memory(layout)
    held = [memory.held_by(rank, [chunks[c] for c in chunks_of(rank, layout)], microbatches) for rank in ranks]
    check_offloaded(held, layout, cluster)

    def step() -> LayoutStep:
        exchanged = sum(count * section.exchanged_elements for section, count in counted(chunks))
        return pricing.step(chunks, pricing.times(memory, microbatches, cluster, exchanged))

    return held, step


@dataclass(frozen=True)
class Quick:
    """A layout's ``peak`` bytes and the ``limit`` of the device; ``bound`` computes a lower bound of its seconds, which
    matters only where it fits."""

    layout: Layout
    peak: int
    limit: int
    bound: Callable[[], float] = field(compare=False, repr=False)

    @cached_property
    def seconds(self) -> float:
        return self.bound()

    def fits(self, limit: int | None) -> bool:
        """Whether the layout fits into ``limit`` bytes; None: into those of the device."""
        return self.peak <= (limit or self.limit)


def quick_price(sections: Sections, layout: Layout, batch: int, cluster: Cluster) -> Quick:
    """Bounds the step without simulating it: the busiest rank, and filling and draining the pipeline. Raises
    :class:`OptionsError` as :func:`price_sections` does."""
    ends = sorted({0, layout.pipeline // 2, layout.pipeline - 1})
    held, step = _divided(sections, layout, batch, cluster, ends)
    fullest = max(held, key=lambda rank_held: rank_held.total + rank_held.lost)
    allowed = cluster.device.memory_bytes - cluster.device.reserve_bytes - fullest.lost
    return Quick(layout, fullest.total, allowed, lambda: step().bound())


def _beyond(busy: float, seconds: float) -> float:
    """Seconds of a step in which the busiest rank neither computes nor communicates; 0 within rounding."""
    return seconds - busy if seconds > busy * (1 + 1e-9) else 0.0
