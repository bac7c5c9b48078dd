"""Prices the all-to-all of rows between expert-parallel ranks: how many rows are sent, and how long this takes.

An all-to-all of a library of collectives sends every choice of a token as a separate row. Libraries made for mixtures
of experts (DeepEP, HybridEP) send a token's row once to each rank that has experts it chose, and over the network
between nodes once to each node, which passes it on; results are added up on the way back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds, fan_out
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


def _spread(block: Block, groups: int) -> float:
    """Mean number of groups that a token is sent to, if the experts of this device form ``groups`` equal groups.
    Assumes that all sets of ``chosen`` experts are equally likely.

    A group of e of all n experts contains none of the k chosen ones with probability C(n - e, k) / C(n, k).
    """
    others = block.count - block.held // groups
    missed = math.comb(others, block.chosen) / math.comb(block.count, block.chosen)
    return groups * (1.0 - missed)


def sent_rows(block: Block, layout: Layout) -> float:
    """Rows that one device sends in an exchange."""
    if layout.dispatch == "rows":
        return block.rows * layout.capacity
    return min(block.tokens * _spread(block, layout.expert), block.rows) * layout.capacity


def exchange_seconds(cluster: Cluster, layout: Layout, block: Block) -> float:
    """Seconds of sending the rows of a block to their experts, or back."""
    if layout.expert == 1:
        return 0.0
    width = float(block.width * block.itemsize)
    mesh = (layout.data * layout.context // layout.expert, layout.expert, layout.tensor)
    rows = sent_rows(block, layout)
    inside = math.floor(fan_out(cluster, mesh, (1,))[0])
    if layout.dispatch == "rows" or inside == layout.expert or layout.expert % inside:
        # By convention the size of an all-to-all is the sum over all devices.
        return collective_seconds(cluster, mesh, "all_to_all", (1,), layout.expert * rows * width)
    nodes = layout.expert // inside
    once = min(block.tokens * _spread(block, nodes), block.rows) * layout.capacity
    split = (mesh[0], nodes, inside, layout.tensor)
    # A node passes rows on while others arrive.
    return max(
        collective_seconds(cluster, split, "all_to_all", (1,), nodes * once * width),
        collective_seconds(cluster, split, "all_to_all", (2,), inside * rows * width),
    )
