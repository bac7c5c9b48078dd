"""How often ranks say where they are: one thread of the first rank hears all of them."""

from __future__ import annotations

# Seconds between two messages of a rank, and of the hub, in worlds that are not larger than :data:`_A_SECOND`.
# Chosen: a fault is known within seconds, at less than a thousandth of a processor.
INTERVAL = 1.0
# Messages that the hub reads in a second, in larger worlds.
# Chosen: a few per cent of the first rank's processor (benchmarks/results/watch.json).
_A_SECOND = 512


def interval_of(ranks: int) -> float:
    """The seconds between two messages of a rank where there are so many."""
    return INTERVAL * max(1.0, ranks / _A_SECOND)
