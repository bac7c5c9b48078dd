"""Layouts and recipes by their fields."""

from __future__ import annotations

from typing import Any

from autopar.cluster.description import Cluster
from autopar.given_fields import own_fields
from autopar.layout import Layout
from benchmarks.emulator.pricing import pricing_of
from benchmarks.emulator.sections.expert_all_to_all import Block
from benchmarks.emulator.sections.experts import BlockCost
from benchmarks.recipes import Recipe


def layout_of(**named: Any) -> Layout:
    """A layout, or a recipe if a field or its value is one of recipes alone."""
    own = {field.name for field in own_fields(Layout)}
    is_layout = all(name in own and value in Layout.choices.get(name, (value,)) for name, value in named.items())
    return Layout(**named) if is_layout else Recipe(**named)


def block_cost(block: Block, layout: Layout, cluster: Cluster) -> BlockCost:
    """What a block of experts costs where gradients of several microbatches are added up."""
    return pricing_of(layout).blocks(layout, cluster, True).cost(block)
