"""The parts of a recipe's price: those of a layout, with what other systems do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.layout import Layout
from autopar.layouts.hardware import check_host
from autopar.layouts.pricing import Pricing, pricing_of
from autopar.layouts.sections.experts import price_block
from autopar.layouts.sections.section import Chunk, Section, Sections
from autopar.layouts.sections.shortened_model import Depth

from .chunks import recipe_chunks
from .kernels import launches_as_graph
from .memory import RecipeMemory
from .modules import check_recomputed, check_represented
from .placing import RecipePlacing
from .recipe import Recipe
from .section import with_host
from .sections import RecipeSections
from .step import RecipeStep
from .times import RecipeTimes, recomputed

FP8 = torch.float8_e4m3fn


class RecipePricing(Pricing):
    """The parts of a recipe's price."""

    placing: ClassVar[type[RecipePlacing]] = RecipePlacing
    sections: ClassVar[type[RecipeSections]] = RecipeSections
    memory: ClassVar[type[RecipeMemory]] = RecipeMemory
    times: ClassVar[type[RecipeTimes]] = RecipeTimes
    step: ClassVar[type[RecipeStep]] = RecipeStep

    def check(self, layout: Layout, cluster: Cluster, graph: Graph, depth: Depth, modules: Sequence[str]) -> None:
        recipe = _recipe(layout)
        check_represented(modules, depth, recipe)
        check_recomputed(graph, recipe)
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

    def with_experts(self, sections: Sections, layout: Layout, cluster: Cluster) -> Sections:
        """A block, too, takes as long as the slower of host and device."""
        found, recipe = super().with_experts(sections, layout, cluster), _recipe(layout)
        before, *layers, after = (
            _waiting(section, recipe, cluster) for section in (found.before, *found.layers, found.after)
        )
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


def _waiting(section: Section, recipe: Recipe, cluster: Cluster) -> Section:
    """A section whose blocks of experts wait for the host, which launches some of their operations for every expert."""
    first = second = 0.0
    for block in section.blocks:
        if not launches_as_graph(block.module, recipe):
            cost, each = price_block(block, recipe, cluster), cluster.device.host_seconds
            first += max(0.0, cost.starts[0] * each - cost.forward)
            second += max(0.0, cost.starts[1] * each - cost.backward)
    return with_host(section, first, second) if first or second else section


def _recipe(layout: Layout) -> Recipe:
    assert isinstance(layout, Recipe)
    return layout


@pricing_of.register
def _(layout: Recipe) -> Pricing:
    return _OF_RECIPES


_OF_RECIPES = RecipePricing()
