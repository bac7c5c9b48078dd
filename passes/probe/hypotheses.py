"""Lists placements of operands that an unknown operation may allow: few, whatever the number of operands.

A hypothesis covers the operands only; execution tells the placements of results. Each hypothesis shards the dims that
must change their size together, or the same dim of all operands, or all dims of one size in the call. Others make sets
of float operands Partial, alone or in addition to sharded ones, like a bias that is added to a contraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, islice, product

from torch.distributed.tensor import Partial, Shard

from autopar.ir.placements import PARTIAL_SUM, REPLICATE, Placement

from .operator_study import OperatorProbe, Slot, slots_of

Inputs = tuple[Placement, ...]
# Hypotheses of one set of dims. Chosen: each costs a process some runs of the operation.
MOST_CHOICES = 8
# Operands whose subsets are all tried. Chosen: there are seven of three, and twice as many of each more.
FEW_OPERANDS = 3


def sharded(operator: OperatorProbe) -> list[Inputs]:
    """Hypotheses that shard operands, with none Partial."""
    free = frozenset().union(*operator.families)
    # In a long list of operands, sharding one tensor alone is useless.
    groups = [g for g in operator.groups if len(g) > 1 or len(operator.call.inputs) <= 2 * FEW_OPERANDS]
    sets = [*groups, *_aligned(operator, free), *_of_one_size(operator, free)]
    hypotheses = (inputs for slots in sets for inputs in _one_dim_each(operator, slots))
    return list(dict.fromkeys(inputs for inputs in hypotheses if any(p != REPLICATE for p in inputs)))


def _aligned(operator: OperatorProbe, free: frozenset[Slot]) -> Iterator[frozenset[Slot]]:
    """The same dim of every operand, counted from the front and from the back."""
    ranks = [t.rank for t in operator.call.inputs]
    for dim in range(max(ranks, default=0)):
        yield frozenset((i, dim) for i in range(len(ranks)) if (i, dim) in free)
        yield frozenset((i, rank - 1 - dim) for i, rank in enumerate(ranks) if (i, rank - 1 - dim) in free)


def _of_one_size(operator: OperatorProbe, free: frozenset[Slot]) -> Iterator[frozenset[Slot]]:
    by_size: dict[int, set[Slot]] = {}
    for operand, dim in slots_of(operator.call):
        if (operand, dim) in free:
            by_size.setdefault(int(operator.call.inputs[operand].shape[dim]), set()).add((operand, dim))
    yield from map(frozenset, by_size.values())


def _one_dim_each(operator: OperatorProbe, slots: Iterable[Slot]) -> Iterator[Inputs]:
    """Shards each operand on one of its dims among ``slots``: every combination, up to :data:`MOST_CHOICES`."""
    dims: dict[int, list[Placement]] = {}
    for operand, dim in sorted(slots):
        dims.setdefault(operand, []).append(Shard(dim))
    for choice in islice(product(*dims.values()), MOST_CHOICES):
        placed = dict(zip(dims, choice, strict=True))
        yield tuple(placed.get(i, REPLICATE) for i in range(len(operator.call.inputs)))


def _floats(operator: OperatorProbe) -> list[int]:
    return [i for i, t in enumerate(operator.call.inputs) if t.dtype.is_floating_point]


def with_partial_floats(operator: OperatorProbe, inputs: Inputs) -> list[Inputs]:
    """The hypothesis with one, or all, of its replicated float operands Partial."""
    others = [i for i in _floats(operator) if inputs[i] == REPLICATE]
    sets: list[tuple[int, ...]] = [(i,) for i in others] if len(others) <= FEW_OPERANDS else []
    if len(others) > 1:
        sets.append(tuple(others))
    return [tuple(PARTIAL_SUM if i in chosen else p for i, p in enumerate(inputs)) for chosen in sets]


def partial(operator: OperatorProbe) -> list[Inputs]:
    """Hypotheses that shard nothing: Partial sums of every set of float operands if these are few, otherwise of all;
    and Partial maxima and minima of all."""
    floats = _floats(operator)
    few = len(floats) <= FEW_OPERANDS
    lengths = range(1, len(floats) + 1) if few else [len(floats)]
    hypotheses: list[Inputs] = []
    for chosen in [set(c) for n in lengths for c in combinations(floats, n)]:
        for op in ("sum", "max", "min") if len(chosen) == len(floats) else ("sum",):
            placed = [Partial(op) if i in chosen else REPLICATE for i in range(len(operator.call.inputs))]
            hypotheses.append(tuple(placed))
    return list(dict.fromkeys(hypotheses))
