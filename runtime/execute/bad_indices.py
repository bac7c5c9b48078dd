"""Reports indices out of range to every rank, after the call and before gradients are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import IndexRangeError
from autopar.ops.index_range import OutOfRange, take_out_of_range
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.minority import named

from .section_code import describe_place

LocatedIndex = tuple[OutOfRange, str]


def raise_bad_indices(exchange: Exchange, inputs: Callable[[], Mapping[str, object]]) -> None:
    """Raises :class:`IndexRangeError`, on every rank, if indices were out of range in the previous call, whose
    ``inputs`` these were by name. Collective, with one byte: results do not show an index whose nan is masked, or that
    looks up integers."""
    located = [(bad, describe_place(bad.place) + _inputs_with(bad.value, inputs())) for bad in take_out_of_range()]
    if any(map(any, exchange.all_bytes(bytes([bool(located)])))):
        raise IndexRangeError(_explain(exchange.ranks, exchange.all_objects(located)))


def _inputs_with(value: int, inputs: Mapping[str, object]) -> str:
    """Which of a call's inputs have the value: of a loss this says more than its place."""
    found = [name for name, leaf in inputs.items() if _has(leaf, value)]
    return f", a value of the input {' or of the input '.join(found)}" if found else ""


def _has(leaf: object, value: int) -> bool:
    own = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    if not isinstance(own, torch.Tensor) or own.is_floating_point() or own.is_complex() or own.dtype == torch.bool:
        return False
    return bool((own == value).any())


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
