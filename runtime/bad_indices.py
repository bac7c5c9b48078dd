"""Tells every rank of indices out of range that some ranks met, once what they computed with them has reached all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.errors import IndexRangeError
from autopar.index_range import OutOfRange, noted

from .exchange import Exchange
from .section_code import describe_place

Found = tuple[OutOfRange, str]


def raise_bad_indices(exchange: Exchange, results: Iterable[torch.Tensor]) -> None:
    """Raises :class:`IndexRangeError` if indices were out of range in a call with these ``results``, which are the same
    on all ranks: on every rank if a result is nan, and only then ranks exchange anything, else where they were."""
    found = [(one, describe_place(one.place)) for one in noted()]
    if any(result.device.type == "cpu" and bool(result.sum().isnan()) for result in results):
        everyone: Sequence[list[Found]] = exchange.all_objects(found)
    else:
        everyone = [found if rank == exchange.index else [] for rank in range(len(exchange.ranks))]
    if any(everyone):
        raise IndexRangeError(_explain(exchange.ranks, everyone))


def _explain(ranks: Sequence[int], everyone: Sequence[list[Found]]) -> str:
    where: dict[tuple[int, int, int, str], set[int]] = {}
    for rank, found in zip(ranks, everyone, strict=True):
        for one, place in found:
            where.setdefault((one.value, one.low, one.high, place), set()).add(rank)
    lines = [
        f"index {value} is out of range, not {low} <= index < {high}{place and f', {place}'} (met on "
        f"rank{'s' if len(own) > 1 else ''} {', '.join(map(str, sorted(own)))})"
        for (value, low, high, place), own in where.items()
    ]
    listed = "\n".join(lines)
    return (
        f"{listed}\nToken ids must be below the number of rows of the embedding that they look up, positions below the "
        "longest sequence, labels below the number of classes (or the loss's ignore_index). No gradient of this call "
        "was kept"
    )
