"""Which parts a layout's price is made of, so that layouts of another kind can have others.

A subclass of :class:`Layout` may describe what other systems do beyond what plans can: it registers a :class:`Pricing`
whose parts override the terms that differ. The only one is ``benchmarks/recipes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import ClassVar

import torch

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.layout import Layout
from benchmarks.emulator.sections.experts import BlockPrices
from benchmarks.emulator.sections.placement import Placing
from benchmarks.emulator.sections.section import Chunk, Sections
from benchmarks.emulator.sections.section_costs import SectionPricer, with_experts
from benchmarks.emulator.sections.shortened_model import Depth
from benchmarks.emulator.step.chunks import cut_into_chunks
from benchmarks.emulator.step.memory import LayoutMemory
from benchmarks.emulator.step.section_seconds import SectionTimes
from benchmarks.emulator.step.step import LayoutStep

from .precision import DTYPES


class Pricing:
    """The parts of a layout's price, in the order in which they are made: where tensors are, what sections and
    their blocks of experts cost, how they are cut into chunks, what ranks hold, how long sections and the step take."""

    placing: ClassVar[type[Placing]] = Placing
    sections: ClassVar[type[SectionPricer]] = SectionPricer
    blocks: ClassVar[type[BlockPrices]] = BlockPrices
    memory: ClassVar[type[LayoutMemory]] = LayoutMemory
    times: ClassVar[type[SectionTimes]] = SectionTimes
    step: ClassVar[type[LayoutStep]] = LayoutStep

    def check(self, layout: Layout, cluster: Cluster, graph: Graph, depth: Depth, modules: Sequence[str]) -> None:
        """Raises :class:`OptionsError` for fields that the cluster or the model contradicts: its ``graph``, which
        layers represent others, and the paths of all modules."""

    def dtype(self, layout: Layout) -> torch.dtype:
        """The dtype of weights and activations."""
        return DTYPES[layout.precision]

    def product_dtype(self, layout: Layout) -> torch.dtype:
        """The dtype of products with weights."""
        return self.dtype(layout)

    def with_experts(self, sections: Sections, prices: BlockPrices) -> Sections:
        """The sections with the costs of their blocks of experts. Raises :class:`OptionsError` if experts do not divide
        evenly."""
        return with_experts(sections, prices)

    def chunks(self, sections: Sections, layout: Layout) -> list[Chunk]:
        """The sections of each chunk. Raises :class:`OptionsError` if a chunk would be empty."""
        return cut_into_chunks(sections, layout)


@singledispatch
def pricing_of(layout: Layout) -> Pricing:
    """How layouts of this kind are priced."""
    return _OWN


_OWN = Pricing()
