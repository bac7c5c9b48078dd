"""Makes garbage collections rare while a model is traced and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Allocations between collections of the youngest objects. Chosen: hardly any for a large model.
ALLOCATIONS = 10_000_000
# Objects that are frozen before anybody freezes any: none, but some hundreds in Python 3.12.
_FROZEN = gc.get_freeze_count()


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Makes garbage collections rare: tracing and planning create many objects that stay alive, and collections would
    take a fifth of their time. What existed before, torch's modules above all, they leave out. At the end, what is left
    counts as old, so that the next collection does not go through all of it. Also a decorator."""
    saved, freezes = gc.get_threshold(), gc.get_freeze_count() <= _FROZEN
    if freezes:
        gc.freeze()
    gc.set_threshold(max(saved[0], ALLOCATIONS), *saved[1:])
    try:
        yield
    finally:
        if freezes:
            gc.freeze()  # What is unfrozen is in the oldest generation.
            gc.unfreeze()
        gc.set_threshold(*saved)
