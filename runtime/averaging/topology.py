"""Who mixes with whom in a round of gossip. All are doubly stochastic: the mean over replicas stays what it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Round:
    """``sends``: the replicas that get this one's parameters; ``receives``: those whose parameters it gets, with their
    weights; ``own``: the weight of its own."""

    sends: tuple[int, ...]
    receives: tuple[tuple[int, float], ...]
    own: float


def round_of(topology: str, index: int, count: int, number: int, seed: int) -> Round:
    """Round ``number``, counted from 0, of replica ``index`` of ``count``.

    >>> round_of("ring", 0, 4, number=0, seed=0)
    Round(sends=(3, 1), receives=((3, 0.3333333333333333), (1, 0.3333333333333333)), own=0.3333333333333333)
    >>> round_of("exponential", 0, 8, number=2, seed=0)
    Round(sends=(4,), receives=((4, 0.5),), own=0.5)
    """
    if count == 1:
        return Round((), (), 1.0)
    if topology == "ring":
        neighbours = tuple(dict.fromkeys(((index - 1) % count, (index + 1) % count)))
        weight = 1.0 / (len(neighbours) + 1)
        return Round(neighbours, tuple((each, weight) for each in neighbours), weight)
    if topology == "exponential":
        hop = 1 << number % (count - 1).bit_length()
        return Round(((index + hop) % count,), (((index - hop) % count, 0.5),), 0.5)
    return _matched(index, count, number, seed)


def _matched(index: int, count: int, number: int, seed: int) -> Round:
    """Pairs of a random order; of an odd number the last replica is alone."""
    # The golden ratio's bits spread consecutive rounds of consecutive seeds apart (Knuth, TAOCP 3, 6.4).
    source = torch.Generator().manual_seed((seed * 0x9E37_79B9_7F4A_7C15 + number) % 2**63)
    order = torch.randperm(count, generator=source, device="cpu").tolist()
    place = order.index(index)
    partner = place ^ 1
    if partner >= count:
        return Round((), (), 1.0)
    return Round((order[partner],), ((order[partner], 0.5),), 0.5)
