"""Prices blocks of experts under a recipe: slots, rows in fp8, tokens that are sent once, and the host's launches."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from autopar.cluster.description import Cluster
from benchmarks.emulator.sections.expert_all_to_all import Block
from benchmarks.emulator.sections.experts import BlockCost, BlockPrices

from .dispatch import sent_rows
from .fp8 import FP8, are_cast
from .modules import launches_as_graph
from .recipe import Recipe

# Operations on rows in addition to products: count, gather, exchange, activate, scatter back.
# Counted by hand, not fitted.
ARRANGING = 8


class RecipeBlocks(BlockPrices):
    """Prices blocks of experts under a recipe."""

    layout: Recipe
    reads: ClassVar[tuple[str, ...]] = (
        *BlockPrices.reads,
        *("capacity", "dispatch", "gradient_accumulation_fusion", "activation_gradient"),
        *("expert_groups", "chosen_groups"),
    )

    def __init__(self, layout: Recipe, cluster: Cluster, accumulates: bool) -> None:
        super().__init__(layout, cluster, accumulates and layout.gradient_accumulation_fusion)

    def rows(self, block: Block) -> float:
        """All slots, filled or not."""
        return super().rows(block) * self.layout.capacity

    def sent_rows(self, block: Block) -> float:
        return sent_rows(block, self.layout)

    def operand_dtype(self, block: Block) -> torch.dtype:
        return FP8 if self._is_fp8(block) else super().operand_dtype(block)

    def grouped_rate(self, block: Block) -> float:
        """In fp8 products of experts are as fast as plain ones: TransformerEngine's in MXFP8 on a GB200 have 1950 to
        2085 TFLOP/s, plain ones there 1.33 times 1471 (the source of B200's ``grouped_products``)."""
        return 1.0 if self._is_fp8(block) else super().grouped_rate(block)

    def orders(self, block: Block) -> int:
        return super().orders(block) if self.layout.dispatch == "rows" else 2

    def cost(self, block: Block) -> BlockCost:
        cost, (wide, up, down) = super().cost(block), (block.width, block.up, block.down)
        cost = replace(cost, backward=cost.backward + self._slowness(block))
        if not self._is_fp8(block):
            return cost
        forward = cost.forward + self._casting(block, wide) + self._casting(block, down)
        return replace(
            cost, forward=forward, backward=cost.backward + self._casting(block, wide) + self._casting(block, up)
        )

    def _slowness(self, block: Block) -> float:
        """Seconds by which the kernel of the activation's gradient is slower (``activation_gradient``)."""
        if self.layout.activation_gradient == 1.0:
            return 0.0
        multiplying = self.product(block, (self.each(block), block.down, block.width))
        kernel = multiplying + self.passing(block, 2 * block.up + block.down)
        return (self.layout.activation_gradient - 1.0) * kernel

    def _is_fp8(self, block: Block) -> bool:
        return self.layout.precision == "fp8" and are_cast(block.width, block.up, block.down)

    def _casting(self, block: Block, width: float) -> float:
        """Seconds of casting ``width`` elements of every row to fp8, once by rows and once by columns."""
        return self.copying(block, width * (1 + 2 * FP8.itemsize / block.itemsize))

    def starts(self, block: Block) -> tuple[int, int]:
        """How many operations the host launches in each phase, some of them for every expert."""
        held, casts = block.held // self.layout.expert, 2 * self._is_fp8(block)
        return (2 + casts) * held + ARRANGING, (4 + casts) * held + ARRANGING

    def host_seconds(self, block: Block) -> tuple[float, float]:
        """Seconds of each phase for which a device waits for the host."""
        if launches_as_graph(block.module, self.layout):
            return 0.0, 0.0
        cost, each = self.cost(block), self.cluster.device.host_seconds
        forward, backward = self.starts(block)
        return max(0.0, forward * each - cost.forward), max(0.0, backward * each - cost.backward)
