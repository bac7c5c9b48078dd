"""What a layout holds on each pipeline rank: weights, gradients, optimizer state, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from autopar.layout import Layout
from autopar.layouts.sections.section import Section, Weight, counted
from autopar.schedule.named import SCHEDULES

# What the caching allocator loses between blocks, as a share of what comes and goes: what rests is allocated once.
# Fitted on the rows of Aleph Alpha that did and did not fit.
FRAGMENTED = 0.24
# Bytes of an element of a weight in fp8.
# By definition of the format.
FP8_BYTES = 1


@dataclass(frozen=True)
class Held:
    """Bytes on a device of one pipeline rank, by part; ``offloaded`` ones (states, and what layers keep) are in its
    share of the host's memory, and ``lost`` ones nowhere: fragmentation."""

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
    """Bytes of the gradient of a weight as it is added up; of one that is not trained none."""
    return weight.elements * layout.gradient_itemsize(weight.itemsize) if weight.trained else 0


def data_ranks(weight: Weight, layout: Layout) -> int:
    """Over how many devices ZeRO divides what belongs to a weight: all that have the same of it."""
    return layout.data * layout.context // max(1, weight.experts)


def resting_states(weight: Weight, layout: Layout) -> int:
    """Bytes of optimizer state of a weight that one device has, or its share of the host."""
    states = weight.elements * layout.state_itemsize if weight.trained else 0
    return states // (data_ranks(weight, layout) if layout.zero >= 1 else 1)


def gathered_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of a weight that rests or is sent in shards: in fp8 its rows alone, from which columns are made."""
    return weight.elements * (FP8_BYTES if weight.cast and layout.weights == "fp8" else weight.itemsize)


def whole_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of a weight that a device has whole: in its dtype, in fp8 in rows and in columns, or both."""
    own = 0 if weight.cast and layout.weights == "fp8" else weight.elements * weight.itemsize
    return own + 2 * FP8_BYTES * weight.elements * weight.cast


def resting_bytes(weight: Weight, layout: Layout) -> int:
    """Bytes of a weight on one device between the sections that use it."""
    shards = data_ranks(weight, layout) if layout.zero >= 3 else 1
    return gathered_bytes(weight, layout) // shards if shards > 1 else whole_bytes(weight, layout)


def held_by(rank: int, chunks: Sequence[Sequence[Section]], layout: Layout, microbatches: int) -> Held:
    """What pipeline rank ``rank`` holds, whose chunks consist of the given sections."""
    every = counted(section for chunk in chunks for section in chunk)
    weights = gradients = optimizer = 0
    for section, often in every:
        for weight in section.weights:
            shards = data_ranks(weight, layout) if layout.zero >= 2 else 1
            weights += often * resting_bytes(weight, layout)
            gradients += often * (gradient_bytes(weight, layout) // shards)
            optimizer += often * resting_states(weight, layout)
    gathered, working = _gathered(every, layout), _working([section for section, _ in every], layout)
    pairs = SCHEDULES[layout.schedule_name].in_flight(rank, layout.pipeline, microbatches, layout.interleave)
    offloaded, moving = offloaded_bytes(chunks[0], layout)
    activations = _activations(pairs / layout.interleave, chunks, layout) - offloaded + moving
    lost = int(FRAGMENTED * (activations + working)) if layout.allocation == "caching" else 0
    on_device, on_host = (0, optimizer) if layout.offload else (optimizer, 0)
    return Held(weights + gathered, gradients, on_device, activations, working, on_host + offloaded, lost)


def offloaded_bytes(chunk: Sequence[Section], layout: Layout) -> tuple[int, int]:
    """Bytes that the first layers of a chunk keep on the host, and of these what is on the device meanwhile: of one
    layer that goes there, or comes back, and of one at work."""
    if not layout.offload_layers:
        return 0, 0
    layers = [section for section in chunk if section.is_layer]
    kept = [_saved(section, layout) for section in layers[: layout.offload_layers]]
    return sum(kept), sum(sorted(kept)[-2:])


def _gathered(every: Sequence[tuple[Section, int]], layout: Layout) -> int:
    """Whole weights of the two sections that are at work or fetched, and the gradient of one; weights that no other
    rank has are whole anyway, and a weight that both take is there once."""
    if layout.zero < 3:
        return 0
    gradient, own, shared = 0, [0, 0], []
    for section, often in every:
        divided = [weight for weight in (*section.weights, *section.lent) if data_ranks(weight, layout) > 1]
        gradient = max(gradient, sum(weight.elements * weight.itemsize for weight in divided))
        alone = sum(whole_bytes(weight, layout) for weight in divided if not weight.shared)
        together = {weight.path: whole_bytes(weight, layout) for weight in divided if weight.shared}
        if together:
            shared += [(alone, together)] * min(2, often)
        else:
            own += [alone] * min(2, often)
    # Of sections that share nothing the largest two alone can be a part of the largest pair.
    sizes = [*shared, *((alone, dict[str, int]()) for alone in sorted(own)[-2:])]
    return gradient + max(_of_both(one, other) for one, other in combinations(sizes, 2))


def _of_both(one: tuple[int, dict[str, int]], other: tuple[int, dict[str, int]]) -> int:
    """Bytes of the weights of two sections, each its own bytes and, by path, those of weights that others have too:
    what both have is one tensor."""
    common = one[1].keys() & other[1].keys()
    twice = sum(min(one[1][path], other[1][path]) for path in common)
    return one[0] + other[0] + sum(one[1].values()) + sum(other[1].values()) - twice


def _activations(in_flight: float, chunks: Sequence[Sequence[Section]], layout: Layout) -> int:
    """Saved by the microbatches in flight. What is made after the last layer goes backward at once, before anything
    else of its microbatch, and counts as work; but under GPipe all microbatches run forward first."""
    kept = ends = 0
    waiting = int(in_flight) - 1 if layout.schedule_name == "gpipe" else 0
    for chunk in chunks:
        for section, often in counted(chunk):
            kept += often * _saved(section, layout) if section.is_layer else 0
            ends += 0 if section.is_layer else section.saved + (waiting - 1) * section.saved_last
        # Layers computed again keep what comes in anyway.
        if chunk[0].is_layer and chunk[0].runs_backward and layout.recompute not in ("full", "operations"):
            kept += chunk[0].entry
    return int(in_flight * kept) + ends


def _saved(section: Section, layout: Layout) -> int:
    """Bytes that a layer keeps of a microbatch, but for what comes in where only the section before has made it."""
    if not section.runs_backward:
        return 0
    if layout.recompute in ("full", "operations"):
        return section.entry + (section.saved_kept if layout.recompute == "operations" else 0)
    return section.saved - _dropped(section, layout)


def _dropped(section: Section, layout: Layout) -> int:
    """Bytes of what a layer would keep that recomputation drops."""
    parts = {
        "none": 0,
        "selective": section.saved_inside,
        "elementwise": section.saved_inside + section.saved_rematerialised,
    }
    return parts.get(layout.recompute, section.saved)


def _working(sections: Sequence[Section], layout: Layout) -> int:
    """What the section that needs most has at work: what is there for a moment, and what it keeps only while it runs
    backward."""
    return max(section.working + _again(section, layout) for section in sections)


def _again(section: Section, layout: Layout) -> int:
    """Bytes that a section keeps only while it runs backward: what it computes again, or has just made."""
    if not section.is_layer:
        return section.saved_last + section.saved_again
    return _dropped(section, layout) + section.saved_again
