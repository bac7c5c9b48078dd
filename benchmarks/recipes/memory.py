"""Bytes of each pipeline rank of a recipe: weights in fp8, saved activations in host memory, other allocators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from benchmarks.emulator.sections.section import Chunk, Section, Weight
from benchmarks.emulator.step.memory import FRAGMENTED, Held, LayoutMemory

from .recipe import Recipe
from .section import of_recipe, weight_of_recipe

# Bytes of an element of a weight in fp8.
# By definition of the format.
FP8_BYTES = 1


@dataclass(frozen=True)
class RecipeMemory(LayoutMemory):
    """The bytes that a recipe holds."""

    layout: Recipe
    rests_by: ClassVar[tuple[str, ...]] = (*LayoutMemory.rests_by, "weights", "gradients", "state_itemsize")

    @property
    def has_copies(self) -> bool:
        """Of a remainder and a weight the update writes both."""
        return super().has_copies and self.layout.masters == "fp32"

    def gathered_bytes(self, weight: Weight) -> int:
        """In fp8 only its cast by rows, from which the other follows."""
        return weight.elements * FP8_BYTES if self._rests_in_fp8(weight) else super().gathered_bytes(weight)

    def whole_bytes(self, weight: Weight) -> int:
        """In its dtype, in fp8 by rows and by columns, or both."""
        own = 0 if self._rests_in_fp8(weight) else super().whole_bytes(weight)
        return own + 2 * FP8_BYTES * weight.elements * weight_of_recipe(weight).cast

    def _rests_in_fp8(self, weight: Weight) -> bool:
        return self.layout.weights == "fp8" and weight_of_recipe(weight).cast

    def held_by(self, rank: int, chunks: Sequence[Chunk], microbatches: int) -> Held:
        held = super().held_by(rank, chunks, microbatches)
        offloaded, moving = self.offloaded_bytes(chunks[0])
        activations = held.activations - offloaded + moving
        lost = int(FRAGMENTED * (activations + held.working)) if self.layout.allocation == "caching" else 0
        return replace(held, activations=activations, offloaded=held.offloaded + offloaded, lost=lost)

    def offloaded_bytes(self, chunk: Sequence[Section]) -> tuple[int, int]:
        """Bytes that the first layers of a chunk save on the host, and how many of these are on the device at a time:
        those of one layer being sent or fetched, and of one that runs."""
        if not self.layout.offload_layers:
            return 0, 0
        layers = [section for section in chunk if section.is_layer]
        kept = [self.saved(section) for section in layers[: self.layout.offload_layers]]
        return sum(kept), sum(sorted(kept)[-2:])

    def saved(self, section: Section) -> int:
        keeps = self.layout.recompute == "operations" and section.runs_backward
        return super().saved(section) + (of_recipe(section).saved_kept if keeps else 0)

    def live_in_backward(self, section: Section) -> int:
        return super().live_in_backward(section) + of_recipe(section).saved_again
