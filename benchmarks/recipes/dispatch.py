"""Prices the sending of tokens to their experts: how many rows are sent, and how long this takes.

An all-to-all of a library of collectives sends every choice of a token as a separate row. Libraries made for mixtures
of experts (DeepEP, HybridEP) send a token's row once to each rank that has experts it chose, and over the network
between nodes once to each node, which passes it on; results are added up on the way back.
"""

from __future__ import annotations

import math

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds, fan_out
from benchmarks.emulator.sections.expert_all_to_all import Block, exchange_seconds

from .recipe import Recipe


def _spread(block: Block, parts: int, recipe: Recipe) -> float:
    """Mean number of parts that a token is sent to, if the experts of this device form ``parts`` equal parts. Assumes
    that all sets of ``chosen`` experts that may be chosen are equally likely.

    A part of e of all n experts contains none of the k chosen ones with probability C(n - e, k) / C(n, k).
    """
    part = block.held // parts
    groups, chosen = recipe.expert_groups, recipe.chosen_groups
    if not groups:
        return parts * (1.0 - _missed(block.count, part, block.chosen))
    group = block.count // groups
    spanned = max(1, part // group)
    return parts * (
        1.0
        - sum(
            _chance(groups, spanned, chosen, taken) * _missed(chosen * group, min(part, taken * group), block.chosen)
            for taken in range(min(spanned, chosen) + 1)
        )
    )


def _missed(count: int, part: int, chosen: int) -> float:
    """The probability that none of the ``chosen`` ones of ``count`` experts is among ``part`` of them."""
    return math.comb(count - part, chosen) / math.comb(count, chosen)


def _chance(groups: int, spanned: int, chosen: int, taken: int) -> float:
    """The probability that ``taken`` of ``spanned`` groups are among the ``chosen`` ones of all ``groups``."""
    ways = math.comb(spanned, taken) * math.comb(groups - spanned, chosen - taken)
    return ways / math.comb(groups, chosen)


def sent_rows(block: Block, recipe: Recipe) -> float:
    """Rows that one device sends in an exchange."""
    if recipe.dispatch == "rows":
        return block.rows * recipe.capacity
    return min(block.tokens * _spread(block, recipe.expert, recipe), block.rows) * recipe.capacity


def dispatch_seconds(cluster: Cluster, recipe: Recipe, block: Block) -> float:
    """Seconds of sending the rows of a block to their experts, or back."""
    mesh, rows = (recipe.data * recipe.context // recipe.expert, recipe.expert, recipe.tensor), sent_rows(block, recipe)
    inside = math.floor(fan_out(cluster, mesh, (1,))[0]) if recipe.expert > 1 else 1
    if recipe.dispatch == "rows" or inside == recipe.expert or recipe.expert % inside:
        return exchange_seconds(cluster, recipe, block, rows)
    nodes, width = recipe.expert // inside, float(block.width * block.itemsize)
    once = min(block.tokens * _spread(block, nodes, recipe), block.rows) * recipe.capacity
    split = (mesh[0], nodes, inside, recipe.tensor)
    # A node passes rows on while others arrive.
    return max(
        collective_seconds(cluster, split, "all_to_all", (1,), nodes * once * width),
        collective_seconds(cluster, split, "all_to_all", (2,), inside * rows * width),
    )
