"""Who differs: the fewer ranks, and not all those that differ from the first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def minority(values: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The positions without the commonest of ``values``, and those with it; of equally common ones the earliest.

    >>> minority(["b", "a", "a"]), minority(["a", "b"]), minority(["a"])
    (([0], [1, 2]), ([1], [0]), ([], [0]))
    """
    usual = max(dict.fromkeys(values), key=values.count)
    odd = [place for place, value in enumerate(values) if value != usual]
    return odd, [place for place, value in enumerate(values) if value == usual]


def named(ranks: Sequence[int]) -> str:
    """The ranks in words, of many the first eight.

    >>> named([2]), named([0, 3])
    ('rank 2', 'ranks 0, 3')
    """
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"
