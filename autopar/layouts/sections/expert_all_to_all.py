"""The exchange of rows between the ranks among which experts are divided: how many are sent, and how long they take.

An all-to-all of a library of collectives sends every choice of a token as a row of its own. Libraries made for mixtures
(DeepEP, HybridEP) send a token's row once to each rank that has experts it chose, and over the network between nodes
once to each node, where it is passed on; what comes back is added up on the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds, fan_out
from autopar.layout import Layout


@dataclass(frozen=True)
class Block:
    """A block on one device of the mesh (context, tensor), experts not yet divided among ``expert`` ranks: ``rows``
    chosen of its ``held`` experts of ``count``, by ``tokens`` of ``width`` that choose ``chosen`` each; ``up`` columns
    before the activation and ``down`` after it; ``module``: the path of its module."""

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
    """To how many of ``groups`` equal groups of the experts held here a token goes, on average: each set of as many
    experts as it chooses is taken to be chosen equally often.

    A group of e of all n experts has none of the k chosen ones with probability C(n - e, k) / C(n, k).
    """
    others = block.count - block.held // groups
    missed = math.comb(others, block.chosen) / math.comb(block.count, block.chosen)
    return groups * (1.0 - missed)


def sent_rows(block: Block, layout: Layout) -> float:
    """Rows that one device hands to an exchange."""
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
        # By convention the bytes of an all-to-all are those of all devices together.
        return collective_seconds(cluster, mesh, "all_to_all", (1,), layout.expert * rows * width)
    nodes = layout.expert // inside
    once = min(block.tokens * _spread(block, nodes), block.rows) * layout.capacity
    split = (mesh[0], nodes, inside, layout.tensor)
    # Rows are passed on in a node while others come in.
    return max(
        collective_seconds(cluster, split, "all_to_all", (1,), nodes * once * width),
        collective_seconds(cluster, split, "all_to_all", (2,), inside * rows * width),
    )
