"""Stages on devices of several kinds: what each block of devices takes for the model and may hold, and the orders in
which the stages may lie on them.

Pipeline rank b is the b-th block of consecutive devices. The placement program is solved for what all blocks can do in
step; what its solution takes on each block is priced with the devices of that block. Which part of the model a block
gets is open, so that devices with little memory may be given the last layers, of which fewer microbatches are in
flight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cluster.description import Cluster
from autopar.placement.breakdown import CostBreakdown, cost_breakdown
from autopar.planner.mesh_solution import MeshSolution, placed_step

# The most orders that are tried one by one; of more, only those in which equal devices follow each other.
# Chosen: each takes a cut and a simulation for every schedule.
MOST_ORDERS = 12


def kinds_of_blocks(cluster: Cluster, blocks: int, devices: int) -> tuple[int, ...]:
    """For each block of ``devices`` consecutive devices, the first block of equal ones."""
    each = [cluster.at(block * devices, devices).device for block in range(blocks)]
    return tuple(each.index(device) for device in each)


def breakdowns_on_blocks(solved: MeshSolution, blocks: int) -> tuple[CostBreakdown, ...]:
    """The cost breakdown of a solution on each block; on equal ones it is computed once."""
    prices = solved.prices
    if not prices.cluster.groups:
        return (solved.breakdown,) * blocks
    kinds = kinds_of_blocks(prices.cluster, blocks, prices.devices)
    step = placed_step(solved.instance, solved.assignment)
    priced = {kind: cost_breakdown(replace(step, prices=prices.on_block(kind))) for kind in set(kinds)}
    return tuple(priced[kind] for kind in kinds)


def blocks_worth(solved: MeshSolution, blocks: int) -> float:
    """How many blocks of what all can do in step the blocks are together worth: each as many as it is quicker."""
    seconds = solved.breakdown.seconds
    return sum(seconds / on_block.seconds for on_block in breakdowns_on_blocks(solved, blocks))


def orders(kinds: Sequence[int], seconds: Sequence[float], limits: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """The orders to try: for each stage of the model in turn, its block. The blocks' own order is the first.

    Args:
        kinds: by block, as :func:`kinds_of_blocks` gives.
        seconds: by block, those of the whole model.
        limits: by block, the bytes that a device may hold.
    """
    blocks, counts = range(len(kinds)), Counter(kinds)
    ways = math.factorial(len(kinds)) // math.prod(math.factorial(n) for n in counts.values())
    sequences: list[tuple[int, ...]]
    if ways <= MOST_ORDERS:
        sequences = [tuple(kinds), *_arrangements(counts)]
    else:
        ascending = [sorted(blocks, key=key.__getitem__) for key in (seconds, limits)]
        listed = [*ascending, *(blocks[::-1] for blocks in ascending)]
        sequences = [tuple(kinds), *(tuple(kinds[block] for block in blocks) for blocks in listed)]
    return tuple(dict.fromkeys(_blocks_in(sequence, kinds) for sequence in sequences))


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
