"""Bytes of each pipeline rank of a layout: weights, gradients, optimizer state, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from autopar.layout import MASTER_BYTES, Layout
from autopar.layouts.sections.section import Chunk, Section, Weight, counted
from autopar.schedule.named import SCHEDULES

# Share of activations and transient memory that the caching allocator loses between blocks. Weights and states are
# allocated once and lose nothing. Fitted on the rows of Aleph Alpha that did and did not fit.
FRAGMENTED = 0.24
# Bytes of an element of a weight in fp8.
# By definition of the format.
FP8_BYTES = 1


@dataclass(frozen=True)
class Held:
    """Bytes on a device of one pipeline rank, by part. ``offloaded``: bytes (states, saved activations) in its share of
    the host's memory. ``lost``: bytes that fragmentation loses."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    offloaded: int = 0
    lost: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


def gradient_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of the gradient of a weight as it is accumulated; 0 if it is not trained."""
    return weight.elements * layout.gradient_itemsize(weight.itemsize) if weight.trained else 0


def data_ranks(weight: Weight, layout: Layout) -> int:
    """The number of devices among which ZeRO divides a weight's state: all that have the same part of the weight."""
    return layout.data * layout.context // max(1, weight.experts)


def stored_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of the value that the optimizer updates: the master weight of a reduced precision, of which the weight is a
    copy or a part."""
    return weight.elements * (weight.itemsize if layout.precision == "fp32" else MASTER_BYTES)


def resting_states(weight: Weight, layout: Layout) -> int:
    """Bytes of optimizer state of a weight on one device, or in its share of the host's memory; 0 if another rank
    stores it."""
    states = weight.elements * layout.state_itemsize if weight.trained and weight.owner is None else 0
    return states // (data_ranks(weight, layout) if layout.zero >= 1 else 1)


def gathered_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of a weight that is stored or sent in shards; in fp8 only its cast by rows, from which the other
    follows."""
    return weight.elements * (FP8_BYTES if weight.cast and layout.weights == "fp8" else weight.itemsize)


def whole_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of a weight that a device stores in full: in its dtype, in fp8 by rows and by columns, or both."""
    own = 0 if weight.cast and layout.weights == "fp8" else weight.elements * weight.itemsize
    return own + 2 * FP8_BYTES * weight.elements * weight.cast


def resting_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of a weight on one device between the sections that use it."""
    shards = data_ranks(weight, layout) if layout.zero >= 3 else 1
    return gathered_bytes(weight, layout) // shards if shards > 1 else whole_bytes(weight, layout)


def held_by(rank: int, chunks: Sequence[Chunk], layout: Layout, microbatches: int) -> Held:
    """The bytes of pipeline rank ``rank``, whose chunks consist of the given sections."""
    distinct = counted(chunks)
    weights = gradients = optimizer = 0
    for section, count in distinct:
        of_weights, of_gradients, of_states = _resting(section, layout)
        weights += count * of_weights
        gradients += count * of_gradients
        optimizer += count * of_states
    gathered, working = _gathered(distinct, layout), _working([section for section, _ in distinct], layout)
    pairs = SCHEDULES[layout.schedule_name].in_flight(rank, layout.pipeline, microbatches, layout.interleave)
    offloaded, moving = offloaded_bytes(chunks[0], layout)
    activations = _activations(pairs / layout.interleave, chunks, layout) - offloaded + moving
    lost = int(FRAGMENTED * (activations + working)) if layout.allocation == "caching" else 0
    on_device, on_host = (0, optimizer) if layout.offload else (optimizer, 0)
    return Held(weights + gathered, gradients, on_device, activations, working, on_host + offloaded, lost)


def _resting(section: Section, layout: Layout) -> tuple[int, int, int]:
    """Bytes of the weights of a section, of their gradients, and of the optimizer's states."""
    dtypes = layout.precision, layout.weights, layout.gradients, layout.state_itemsize

    def added_up() -> tuple[int, int, int]:
        weights = section.weights
        shards = (data_ranks(weight, layout) if layout.zero >= 2 else 1 for weight in weights)
        return (
            sum(resting_bytes(weight, layout) for weight in weights),
            sum(gradient_bytes(weight, layout) // each for weight, each in zip(weights, shards, strict=True)),
            sum(resting_states(weight, layout) for weight in weights),
        )

    return section.once(("resting", layout.zero, layout.data, layout.context, *dtypes), added_up)


def offloaded_bytes(chunk: Sequence[Section], layout: Layout) -> tuple[int, int]:
    """Bytes that the first layers of a chunk save on the host, and how many of these are on the device at a time: those
    of one layer being sent or fetched, and of one that runs."""
    if not layout.offload_layers:
        return 0, 0
    layers = [section for section in chunk if section.is_layer]
    kept = [_saved(section, layout) for section in layers[: layout.offload_layers]]
    return sum(kept), sum(sorted(kept)[-2:])


def _gathered(distinct: Sequence[tuple[Section, int]], layout: Layout) -> int:
    """Bytes of the gathered weights of two sections, one running and one prefetched, and of the gradient of one.
    Weights that no other rank has are not gathered, and a weight that both sections use counts once."""
    if layout.zero < 3:
        return 0
    gradient, own, shared = 0, [0, 0], []
    for section, count in distinct:
        divided = [weight for weight in (*section.weights, *section.lent) if data_ranks(weight, layout) > 1]
        gradient = max(gradient, sum(weight.elements * weight.itemsize for weight in divided))
        alone = sum(whole_bytes(weight, layout) for weight in divided if not weight.shared)
        by_path = {weight.path: whole_bytes(weight, layout) for weight in divided if weight.shared}
        if by_path:
            shared += [(alone, by_path)] * min(2, count)
        else:
            own += [alone] * min(2, count)
    # Of sections that share nothing only the largest two can be in the largest pair.
    sizes = [*shared, *((alone, dict[str, int]()) for alone in sorted(own)[-2:])]
    return gradient + max(_of_both(first, second) for first, second in combinations(sizes, 2))


def _of_both(first: tuple[int, dict[str, int]], second: tuple[int, dict[str, int]]) -> int:
    """Bytes of the weights of two sections. Each is given by the bytes of its own weights and, by path, those of shared
    weights; a weight of both counts once."""
    common = first[1].keys() & second[1].keys()
    twice = sum(min(first[1][path], second[1][path]) for path in common)
    return first[0] + second[0] + sum(first[1].values()) + sum(second[1].values()) - twice


def _activations(in_flight: float, chunks: Sequence[Chunk], layout: Layout) -> int:
    """Bytes saved by the microbatches in flight. Backward frees the values after the last layer first, so they count as
    transient; but under GPipe all microbatches run forward first."""
    kept = ends = 0
    waiting = int(in_flight) - 1 if layout.schedule_name == "gpipe" else 0
    for chunk in chunks:
        for section, count in chunk.counted:
            kept += count * _saved(section, layout) if section.is_layer else 0
            ends += 0 if section.is_layer else section.saved + (waiting - 1) * section.saved_last
        # Recomputed layers save their inputs anyway.
        if chunk[0].is_layer and chunk[0].runs_backward and layout.recompute not in ("full", "operations"):
            kept += chunk[0].entry
    return int(in_flight * kept) + ends


def _saved(section: Section, layout: Layout) -> int:
    """Bytes that a layer saves of a microbatch, without inputs that the section before saves."""
    if not section.runs_backward:
        return 0
    if layout.recompute in ("full", "operations"):
        return section.entry + (section.saved_kept if layout.recompute == "operations" else 0)
    return section.saved - _dropped(section, layout)


def _dropped(section: Section, layout: Layout) -> int:
    """Bytes that a layer would save without recomputation, and does not save with it."""
    parts = {
        "none": 0,
        "selective": section.saved_inside,
        "elementwise": section.saved_inside + section.saved_rematerialised,
    }
    return parts.get(layout.recompute, section.saved)


def _working(sections: Sequence[Section], layout: Layout) -> int:
    """Transient bytes of the section that needs most, including values that live only while it runs backward."""
    return max(section.working + _live_in_backward(section, layout) for section in sections)


def _live_in_backward(section: Section, layout: Layout) -> int:
    """Bytes that live only while a section runs backward: recomputed values, and those just computed after the last
    layer."""
    if not section.is_layer:
        return section.saved_last + section.saved_again
    return _dropped(section, layout) + section.saved_again
