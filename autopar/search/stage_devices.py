"""Stages on devices of several kinds: what each block of devices takes for the model and may hold, and the orders in
which the stages may lie on them.

Pipeline rank b is the b-th block of consecutive devices. The placement program of equal blocks is solved for what all
of them can do in step; what its solution takes on each block is priced with the devices of that block. Unequal blocks
have a program each. Which part of the model a block gets is open, so that devices with little memory may be given the
last layers, of which fewer microbatches are in flight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cluster.description import Cluster
from autopar.placement.breakdown import CostBreakdown, cost_breakdown
from autopar.placement.prices import Prices
from autopar.planner.mesh_solution import MeshSolution, placed_step

# The most orders that are tried one by one; of more, only those in which equal devices follow each other.
# Chosen: each takes a cut and a simulation for every schedule.
MOST_ORDERS = 12


def kinds_of_blocks(cluster: Cluster, blocks: Sequence[range]) -> tuple[int, ...]:
    """For each block of consecutive devices, the first one of as many of the same kind."""
    each = [(len(block), cluster.at(block.start, len(block)).device) for block in blocks]
    return tuple(each.index(own) for own in each)


def breakdowns_on_blocks(solutions: Sequence[MeshSolution], cluster: Cluster) -> tuple[CostBreakdown, ...]:
    """The cost breakdown of the solution of each block there; on equal ones it is computed once."""
    prices = prices_on_blocks(solutions)
    blocks = [range(block * own.devices, (block + 1) * own.devices) for block, own in enumerate(prices)]
    if all(own is solved.prices for own, solved in zip(prices, solutions, strict=True)):
        return tuple(solved.breakdown for solved in solutions)
    kinds, solved = kinds_of_blocks(cluster, blocks), solutions[0]
    step = placed_step(solved.instance, solved.assignment)
    priced = {kind: cost_breakdown(replace(step, prices=prices[kind])) for kind in set(kinds)}
    return tuple(priced[kind] for kind in kinds)


def prices_on_blocks(solutions: Sequence[MeshSolution]) -> tuple[Prices, ...]:
    """The prices of each block's own devices. Unequal blocks have a solution each, priced so; equal blocks share
    one."""
    return tuple(solved.prices.on_block(block) for block, solved in enumerate(solutions))


def orders(
    kinds: Sequence[int], seconds: Sequence[float], limits: Sequence[float], pinned: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """The orders to try: for each stage of the model in turn, its block. The blocks' own order is the first.

    Args:
        kinds: by block, as :func:`kinds_of_blocks` gives.
        seconds: by block, those of the whole model.
        limits: by block, the bytes that a device may hold.
        pinned: by segment of the model, the block on which pins put it, or -1. If they name all blocks, theirs is an
            order to try, where blocks differ.
    """
    asked = tuple(dict.fromkeys(block for block in pinned if block >= 0))
    by_pins = (asked,) if len(asked) == len(kinds) and len(set(kinds)) > 1 else ()
    blocks, counts = range(len(kinds)), Counter(kinds)
    ways = math.factorial(len(kinds)) // math.prod(math.factorial(n) for n in counts.values())
    sequences: list[tuple[int, ...]]
    if ways <= MOST_ORDERS:
        sequences = [tuple(kinds), *_arrangements(counts)]
    else:
        ascending = [sorted(blocks, key=key.__getitem__) for key in (seconds, limits)]
        listed = [*ascending, *(blocks[::-1] for blocks in ascending)]
        sequences = [tuple(kinds), *(tuple(kinds[block] for block in blocks) for blocks in listed)]
    return tuple(dict.fromkeys((*(_blocks_in(sequence, kinds) for sequence in sequences), *by_pins)))


def _arrangements(left: Counter[int]) -> Iterator[tuple[int, ...]]:
    """All different sequences of the elements of ``left``."""
    if not left:
        yield ()
    for kind in sorted(left):
        for rest in _arrangements(+(left - Counter([kind]))):
            yield (kind, *rest)


def _blocks_in(sequence: Sequence[int], kinds: Sequence[int]) -> tuple[int, ...]:
    """The blocks of a sequence of kinds; of equal blocks, the earlier first."""
    unused = {kind: [block for block, other in enumerate(kinds) if other == kind] for kind in set(kinds)}
    return tuple(unused[kind].pop(0) for kind in sequence)
