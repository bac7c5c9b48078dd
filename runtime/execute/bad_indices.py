"""Reports indices out of range to every rank, after the call and before gradients are stored."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import IndexRangeError
from autopar.ops.index_range import OutOfRange, take_out_of_range
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.minority import named

from .section_code import describe_place

LocatedIndex = tuple[OutOfRange, str]


def raise_bad_indices(exchange: Exchange) -> None:
    """Raises :class:`IndexRangeError`, on every rank, if indices were out of range in the previous call. Collective,
    with one byte: results do not show an index whose nan is masked, or that looks up integers."""
    located = [(bad, describe_place(bad.place)) for bad in take_out_of_range()]
    if any(map(any, exchange.all_bytes(bytes([bool(located)])))):
        raise IndexRangeError(_explain(exchange.ranks, exchange.all_objects(located)))


def _explain(ranks: Sequence[int], everyone: Sequence[list[LocatedIndex]]) -> str:
    where: dict[tuple[int, int, int, str], set[int]] = {}
    for rank, located in zip(ranks, everyone, strict=True):
        for bad, place in located:
            where.setdefault((bad.value, bad.low, bad.high, place), set()).add(rank)
    lines = [
        f"index {value} is out of range, not {low} <= index < {high}{place and f', {place}'} (met on "
        f"{named(sorted(own))})"
        for (value, low, high, place), own in where.items()
    ]
    listed = "\n".join(lines)
    return (
        f"{listed}\nToken ids must be below the number of rows of the embedding that they look up, positions below the "
        "longest sequence, labels below the number of classes (or the loss's ignore_index). No gradient of this call "
        "was kept"
    )
