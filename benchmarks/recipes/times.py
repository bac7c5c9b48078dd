"""Seconds of sections and of their collectives under a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from autopar.cluster.description import Cluster
from autopar.cost.overlap import at_once
from autopar.layout import MASTER_BYTES
from autopar.placement.overlap_windows import HiddenShares
from benchmarks.emulator.sections.section import Chunk, Seconds, Section, Weight
from benchmarks.emulator.step.section_seconds import SectionTimes, recompute_seconds
from benchmarks.emulator.stored import repeats_layers

from .dispatch import dispatch_seconds
from .memory import RecipeMemory
from .recipe import Recipe
from .section import of_recipe, weight_of_recipe

# The number of pieces of a collective that overlaps the product next to it: one of them is exposed.
# Chosen: Transformer Engine's default num_splits where it overlaps by pieces; not fitted.
PIECES = 4


class RecipeTimes(SectionTimes):
    """Seconds of sections under a recipe."""

    memory: RecipeMemory
    layout: Recipe

    def __init__(self, memory: RecipeMemory, microbatches: int, cluster: Cluster, exchanged: int) -> None:
        super().__init__(memory, microbatches, cluster, exchanged)
        if "expert" in self.layout.overlap:
            # What of an exchange is exposed depends on stages too.
            self._key = self._key, self.layout.pipeline

    def recomputing(self, section: Section) -> Seconds:
        return recomputed(section, self.layout)

    def again_host(self, section: Section) -> float:
        """Seconds of :meth:`again` in which the device waits for the host."""
        return host_again(section, self.layout) if section.runs_backward else 0.0

    def exchange(self, section: Section) -> float:
        return sum(2 * dispatch_seconds(self.cluster, self.layout, block) for block in section.blocks)

    def accumulating(self, section: Section) -> float:
        """Without fusion also operations of their own for experts."""
        if self.layout.gradient_accumulation_fusion:
            return super().accumulating(section)
        experts = [weight for weight in section.trained if weight.experts]
        moved = sum(w.elements * w.itemsize + 2 * self.memory.gradient_bytes(w) for w in experts)
        return super().accumulating(section) + moved / self.cluster.device.memory_bandwidth

    def alone(self, section: Section) -> tuple[float, float]:
        """With ``"tensor"`` overlapped piece by piece with the products next to them."""
        if "tensor" not in self.layout.overlap:
            return super().alone(section)
        forward, backward = of_recipe(section).hosts
        back = section.backward + self.again(section)
        return self._by_pieces(section.forward, forward), self._by_pieces(back, backward + self.again_host(section))

    def _by_pieces(self, seconds: Seconds, host: float) -> float:
        both = seconds.compute - host, seconds.communicate
        return at_once(*both, self.taken) + min(both) / PIECES + host

    def exchanging(self, seconds: float, exchange: float) -> float:
        """With ``"expert"`` exchanges overlap another microbatch, and occupy some of its processors. The first forward
        and the last backward of a step have no other microbatch beside them, of a pipeline those of every stage's
        filling and draining (Megatron-Core, ``pipeline_parallel/combined_1f1b.py``: "all-to-all comm is exposed" in
        them)."""
        one_by_one = super().exchanging(seconds, exchange)
        if "expert" not in self.layout.overlap:
            return one_by_one
        alone = min(1.0, self.layout.pipeline / self.microbatches)
        return alone * one_by_one + (1.0 - alone) * at_once(seconds, exchange, self.taken)

    def hidden_shares(self, chunk: Chunk, sent: Literal["weight", "gradient"]) -> HiddenShares:
        return super().hidden_shares(chunk, sent) if sent in self.layout.overlap else HiddenShares()

    @property
    def reduces_by(self) -> str:
        return super().reduces_by if self.layout.reduction == "scatter" else "all_reduce"

    def reduced_bytes(self, weight: Weight) -> float:
        if self.layout.reduction != "all-fp32":
            return self.memory.gradient_bytes(weight)
        return weight.trained * weight.elements * MASTER_BYTES

    def sharding(self, section: Section) -> tuple[float, float]:
        """Weights are gathered together, or one by one, and then once more where recomputation reads them."""
        if self.layout.gathers == "layer":
            return super().sharding(section)
        every = *section.weights, *section.lent
        gather = self._gather_each(every)
        again = gather if section.runs_backward else 0.0
        scatter = self.over_data("reduce_scatter", section.weights, self.memory.gradient_bytes)
        return gather, again + self._gather_again(section) + scatter

    def _gather_each(self, weights: tuple[Weight, ...]) -> float:
        return sum(self.gather((weight,)) for weight in weights)

    def _gather_again(self, section: Section) -> float:
        """Seconds of gathering weights for recomputation: all weights of layers that are recomputed in full, otherwise
        those that recomputed operations read."""
        every = *section.weights, *section.lent
        if not self.again(section).compute:
            return 0.0
        if section.is_layer and repeats_layers(self.layout):
            return self._gather_each(every)
        ways = {"recomputed", self.layout.recompute if section.is_layer else "none"}
        return self._gather_each(tuple(weight for weight in every if weight_of_recipe(weight).again & ways))

    def chunk_times(self, chunk: Chunk) -> tuple[float, float]:
        forward, backward = super().chunk_times(chunk)
        forward_waits, backward_waits = self.fetching(chunk)
        return forward + forward_waits, backward + backward_waits

    def fetching(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds for which forward and backward of a chunk wait for saved activations in host memory."""
        offloaded, _ = self.memory.offloaded_bytes(chunk)
        if not offloaded:
            return 0.0, 0.0
        transfer = offloaded / self.cluster.device.host_bandwidth
        forward, backward = (max(0.0, transfer - alone) for alone in super().chunk_times(chunk))
        return forward, backward


def recomputed(section: Section, recipe: Recipe) -> Seconds:
    """The cost of recomputing a section that runs backward, with the modules that the recipe names. It repeats the same
    share of forward's waiting for the host as of its computation, since saved operations are not launched again."""
    again = _on_device(section, recipe)
    return replace(again, compute=again.compute + host_again(section, recipe))


def host_again(section: Section, recipe: Recipe) -> float:
    """Seconds of :func:`recomputed` in which the device waits for the host."""
    forward, host = of_recipe(section).device_forward.compute, of_recipe(section).hosts[0]
    return min(1.0, _on_device(section, recipe).compute / forward) * host if forward else 0.0


def _on_device(section: Section, recipe: Recipe) -> Seconds:
    """:func:`recomputed` without waiting for the host."""
    own = of_recipe(section)
    if section.is_layer and recipe.recompute == "full":
        return own.device_forward
    if section.is_layer and recipe.recompute == "operations":
        first = own.device_forward
        kept = Seconds(first.compute - own.kept.compute, first.communicate - own.kept.communicate)
        return own.again + kept
    return own.again + recompute_seconds(section, recipe)
