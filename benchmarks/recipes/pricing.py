"""The parts of a recipe's price: those of a layout, with what other systems do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.layout import Layout, degrees
from benchmarks.emulator.hardware import check_host
from benchmarks.emulator.pricing import Pricing, pricing_of
from benchmarks.emulator.sections.experts import BlockPrices, expert_counts
from benchmarks.emulator.sections.section import Chunk, Section, Sections
from benchmarks.emulator.sections.shortened_model import Depth

from .chunks import recipe_chunks
from .experts import RecipeBlocks
from .fp8 import FP8
from .memory import RecipeMemory
from .modules import check_recomputed, check_represented
from .placing import RecipePlacing
from .recipe import Recipe
from .section import with_host
from .sections import RecipeSections
from .step import RecipeStep
from .times import RecipeTimes, recomputed


class RecipePricing(Pricing):
    """The parts of a recipe's price."""

    placing: ClassVar[type[RecipePlacing]] = RecipePlacing
    sections: ClassVar[type[RecipeSections]] = RecipeSections
    blocks: ClassVar[type[RecipeBlocks]] = RecipeBlocks
    memory: ClassVar[type[RecipeMemory]] = RecipeMemory
    times: ClassVar[type[RecipeTimes]] = RecipeTimes
    step: ClassVar[type[RecipeStep]] = RecipeStep

    def check(self, layout: Layout, cluster: Cluster, graph: Graph, depth: Depth, modules: Sequence[str]) -> None:
        recipe = _recipe(layout)
        check_represented(modules, depth, recipe)
        check_recomputed(graph, recipe)
        for count in expert_counts(graph) if recipe.expert_groups else ():
            if count % recipe.expert_groups:
                raise OptionsError(
                    f"Recipe(expert_groups={recipe.expert_groups}): a block has {count} experts, which do not divide "
                    f"among so many groups; {degrees('expert_groups', count, recipe.expert_groups)}"
                )
        if recipe.offload_layers:
            check_host(recipe, cluster, "offload_layers")
        if recipe.precision == "fp8" and not cluster.device.has_rate(FP8):
            raise OptionsError(
                f"Recipe(precision='fp8'): a {cluster.device.name} has no fp8 products: its peak_flops are of "
                f"{', '.join(cluster.device.peak_flops)}"
            )

    def dtype(self, layout: Layout) -> torch.dtype:
        return torch.bfloat16 if _recipe(layout).precision == "fp8" else super().dtype(layout)

    def product_dtype(self, layout: Layout) -> torch.dtype:
        return FP8 if _recipe(layout).precision == "fp8" else super().product_dtype(layout)

    def with_experts(self, sections: Sections, prices: BlockPrices) -> Sections:
        """A block, too, takes as long as the slower of host and device."""
        found = super().with_experts(sections, prices)
        before, *layers, after = (_waiting(section, prices) for section in (found.before, *found.layers, found.after))
        return Sections(before, tuple(layers), after, found.priced_as)

    def chunks(self, sections: Sections, layout: Layout) -> list[Chunk]:
        recipe = _recipe(layout)

        def work(section: Section) -> float:
            """Seconds of computation, of collectives of tensor and context ranks, and of waiting for the host, in turn.
            Excludes what is sent over data ranks (rows of experts, weights that ZeRO-3 gathers), so chunks take
            unequally long where sections send unequally much of it."""
            once = section.forward + section.backward
            return (once + recomputed(section, recipe) if section.runs_backward else once).total

        return recipe_chunks(sections, recipe, work)


def _waiting(section: Section, prices: BlockPrices) -> Section:
    """A section with the seconds for which its blocks of experts wait for the host."""
    assert isinstance(prices, RecipeBlocks)
    waits = [prices.host_seconds(block) for block in section.blocks]
    if not any(map(any, waits)):
        return section
    return with_host(section, sum(forward for forward, _ in waits), sum(backward for _, backward in waits))


def _recipe(layout: Layout) -> Recipe:
    assert isinstance(layout, Recipe)
    return layout


@pricing_of.register
def _(layout: Recipe) -> Pricing:
    return _OF_RECIPES


_OF_RECIPES = RecipePricing()
