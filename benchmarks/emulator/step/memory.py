"""Bytes of each pipeline rank of a layout: weights, gradients, optimizer state, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from autopar.layout import MASTER_BYTES, Layout
from autopar.schedule.named import SCHEDULES
from benchmarks.emulator.sections.section import Chunk, Section, Weight, counted
from benchmarks.emulator.stored import gradient_itemsize, repeats_layers, state_itemsize

# Share of activations and transient memory that the caching allocator loses between blocks. Weights and states are
# allocated once and lose nothing. Fitted on the rows of Aleph Alpha that did and did not fit.
FRAGMENTED = 0.24


@dataclass(frozen=True)
class Held:
    """Bytes on a device of one pipeline rank, by part. ``offloaded``: bytes in its share of the host's memory.
    ``lost``: bytes that fragmentation loses."""

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


@dataclass(frozen=True)
class LayoutMemory:
    """The bytes that a layout holds, of each weight, of each section and of each pipeline rank."""

    layout: Layout
    # What of a layout the bytes of its weights, gradients and states depend on.
    rests_by: ClassVar[tuple[str, ...]] = ("zero", "data", "context", "precision")

    def gradient_bytes(self, weight: Weight) -> int:
        """Bytes of the gradient of a weight as it is accumulated; 0 if it is not trained."""
        return weight.elements * gradient_itemsize(self.layout, weight.itemsize) if weight.trained else 0

    def data_ranks(self, weight: Weight) -> int:
        """The number of devices among which ZeRO divides a weight's state: all that have the same part of the
        weight."""
        return self.layout.data * self.layout.context // max(1, weight.experts)

    def stored_bytes(self, weight: Weight) -> int:
        """Bytes of the value that the optimizer updates: the master weight of a reduced precision, of which the weight
        is a copy or a part."""
        return weight.elements * (weight.itemsize if self.layout.precision == "fp32" else MASTER_BYTES)

    @property
    def has_copies(self) -> bool:
        """Whether weights are copies of master weights, which an update writes apart."""
        return self.layout.precision != "fp32"

    def resting_states(self, weight: Weight) -> int:
        """Bytes of optimizer state of a weight on one device, or in its share of the host's memory; 0 if another rank
        stores it."""
        states = weight.elements * state_itemsize(self.layout) if weight.trained and weight.owner is None else 0
        return states // (self.data_ranks(weight) if self.layout.zero >= 1 else 1)

    def gathered_bytes(self, weight: Weight) -> int:
        """Bytes of a weight that is stored or sent in shards."""
        return weight.elements * weight.itemsize

    def whole_bytes(self, weight: Weight) -> int:
        """Bytes of a weight that a device stores in full."""
        return weight.elements * weight.itemsize

    def resting_bytes(self, weight: Weight) -> int:
        """Bytes of a weight on one device between the sections that use it."""
        shards = self.data_ranks(weight) if self.layout.zero >= 3 else 1
        return self.gathered_bytes(weight) // shards if shards > 1 else self.whole_bytes(weight)

    def held_by(self, rank: int, chunks: Sequence[Chunk], microbatches: int) -> Held:
        """The bytes of pipeline rank ``rank``, whose chunks consist of the given sections."""
        layout, distinct = self.layout, counted(chunks)
        weights = gradients = optimizer = 0
        for section, count in distinct:
            of_weights, of_gradients, of_states = self._resting(section)
            weights += count * of_weights
            gradients += count * of_gradients
            optimizer += count * of_states
        gathered, working = self._gathered(distinct), self._working([section for section, _ in distinct])
        pairs = SCHEDULES[layout.schedule_name].in_flight(rank, layout.pipeline, microbatches, layout.interleave)
        activations = self._activations(pairs / layout.interleave, chunks)
        on_device, on_host = (0, optimizer) if layout.offload else (optimizer, 0)
        lost = int(FRAGMENTED * (activations + working))
        return Held(weights + gathered, gradients, on_device, activations, working, on_host, lost)

    def _resting(self, section: Section) -> tuple[int, int, int]:
        """Bytes of the weights of a section, of their gradients, and of the optimizer's states."""

        def added_up() -> tuple[int, int, int]:
            weights = section.weights
            shards = (self.data_ranks(weight) if self.layout.zero >= 2 else 1 for weight in weights)
            return (
                sum(map(self.resting_bytes, weights)),
                sum(self.gradient_bytes(weight) // each for weight, each in zip(weights, shards, strict=True)),
                sum(map(self.resting_states, weights)),
            )

        return section.once(("resting", *(getattr(self.layout, name) for name in self.rests_by)), added_up)

    def _gathered(self, distinct: Sequence[tuple[Section, int]]) -> int:
        """Bytes of the gathered weights of two sections, one running and one prefetched, and of the gradient of one.
        Weights that no other rank has are not gathered, and a weight that both sections use counts once."""
        if self.layout.zero < 3:
            return 0
        gradient, own, shared = 0, [0, 0], []
        for section, count in distinct:
            divided = [weight for weight in (*section.weights, *section.lent) if self.data_ranks(weight) > 1]
            gradient = max(gradient, sum(weight.elements * weight.itemsize for weight in divided))
            alone = sum(self.whole_bytes(weight) for weight in divided if not weight.shared)
            by_path = {weight.path: self.whole_bytes(weight) for weight in divided if weight.shared}
            if by_path:
                shared += [(alone, by_path)] * min(2, count)
            else:
                own += [alone] * min(2, count)
        # Of sections that share nothing only the largest two can be in the largest pair.
        sizes = [*shared, *((alone, dict[str, int]()) for alone in sorted(own)[-2:])]
        return gradient + max(_of_both(first, second) for first, second in combinations(sizes, 2))

    def _activations(self, in_flight: float, chunks: Sequence[Chunk]) -> int:
        """Bytes saved by the microbatches in flight. Backward frees the values after the last layer first, so they
        count as transient; but under GPipe all microbatches run forward first."""
        kept = ends = 0
        waiting = int(in_flight) - 1 if self.layout.schedule_name == "gpipe" else 0
        for chunk in chunks:
            for section, count in chunk.counted:
                kept += count * self.saved(section) if section.is_layer else 0
                ends += 0 if section.is_layer else section.saved + (waiting - 1) * section.saved_last
            # Recomputed layers save their inputs anyway.
            if chunk[0].is_layer and chunk[0].runs_backward and not repeats_layers(self.layout):
                kept += chunk[0].entry
        return int(in_flight * kept) + ends

    def saved(self, section: Section) -> int:
        """Bytes that a layer saves of a microbatch, without inputs that the section before saves."""
        if not section.runs_backward:
            return 0
        return section.entry if repeats_layers(self.layout) else section.saved - self._dropped(section)

    def _dropped(self, section: Section) -> int:
        """Bytes that a layer would save without recomputation, and does not save with it."""
        parts = {
            "none": 0,
            "selective": section.saved_inside,
            "elementwise": section.saved_inside + section.saved_rematerialised,
        }
        return parts.get(self.layout.recompute, section.saved)

    def _working(self, sections: Sequence[Section]) -> int:
        """Transient bytes of the section that needs most, including values that live only while it runs backward."""
        return max(section.working + self.live_in_backward(section) for section in sections)

    def live_in_backward(self, section: Section) -> int:
        """Bytes that live only while a section runs backward: recomputed values, and those just computed after the last
        layer."""
        return self._dropped(section) if section.is_layer else section.saved_last


def _of_both(first: tuple[int, dict[str, int]], second: tuple[int, dict[str, int]]) -> int:
    """Bytes of the weights of two sections. Each is given by the bytes of its own weights and, by path, those of shared
    weights; a weight of both counts once."""
    common = first[1].keys() & second[1].keys()
    twice = sum(min(first[1][path], second[1][path]) for path in common)
    return first[0] + second[0] + sum(first[1].values()) + sum(second[1].values()) - twice
