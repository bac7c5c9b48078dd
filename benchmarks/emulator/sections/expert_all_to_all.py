"""Prices the all-to-all of rows between expert-parallel ranks: every choice of a token is sent as a separate row."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.layout import Layout


@dataclass(frozen=True)
class Block:
    """A block of experts on one device of the mesh (context, tensor), before experts are divided among ``expert``
    ranks.

    ``held`` of its ``count`` experts are on the device and get ``rows`` rows. ``tokens`` of ``width`` elements choose
    ``chosen`` experts each. ``up``: columns before the activation; ``down``: after it; ``module``: the module's
    path."""

    rows: float
    held: int
    count: int
    width: int
    up: int
    down: int
    itemsize: int
    tokens: int
    chosen: int
    module: str = ""


def exchange_seconds(cluster: Cluster, layout: Layout, block: Block, rows: float) -> float:
    """Seconds of sending ``rows`` of a block to their experts, or back."""
    if layout.expert == 1:
        return 0.0
    mesh = (layout.data * layout.context // layout.expert, layout.expert, layout.tensor)
    # By convention the size of an all-to-all is the sum over all devices.
    nbytes = layout.expert * rows * float(block.width * block.itemsize)
    return collective_seconds(cluster, mesh, "all_to_all", (1,), nbytes)
