"""What a layout stores of each element, and on which axes a microbatch is placed. Recipes, which store otherwise,
register their own (:mod:`benchmarks.recipes.recipe`)."""

from __future__ import annotations

from functools import singledispatch

from autopar.layout import MASTER_BYTES, Layout

# The axes of the mesh on which one data rank's microbatch is placed.
CONTEXT, TENSOR = 0, 1
# How many moments Adam keeps. By definition of the optimizer.
MOMENTS = 2


@singledispatch
def repeats_layers(layout: Layout) -> bool:
    """Whether backward runs layers once more, from their inputs."""
    return layout.recompute == "full"


@singledispatch
def moment_itemsize(layout: Layout) -> int:
    """Bytes of an element's moments."""
    return MOMENTS * MASTER_BYTES


@singledispatch
def state_itemsize(layout: Layout) -> int:
    """Bytes of optimizer state per element: its moments, and the master weight of reduced precisions."""
    return moment_itemsize(layout) + MASTER_BYTES * (layout.precision != "fp32")


@singledispatch
def gradient_itemsize(layout: Layout, itemsize: int) -> int:
    """Bytes of an element of the gradient of a weight of ``itemsize``, as it is accumulated."""
    return MASTER_BYTES
