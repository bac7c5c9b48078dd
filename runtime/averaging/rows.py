"""This replica's rows of a global batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import OptionsError
from autopar.torch_internals.trees import tree_flatten, tree_unflatten

from .members import Members

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def own_rows(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, count: int, *, plans: bool = False
) -> Inputs:
    """The inputs with replica ``index`` of ``count``'s rows of each plain tensor that has as many rows as the batch: as
    equal parts as possible, the first ones larger. DTensors are this replica's own already. ``plans``:
    whether all replicas take the plan for the first one's rows. Raises :class:`OptionsError` for too few rows."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    rows = _rows(leaves)
    if rows is None or count == 1:
        return args, dict(kwargs)
    start, length = part_of(rows, index, count)
    if plans and rows % count and rows < 2 * count:
        raise OptionsError(
            f"the first batch has {rows} rows for {count} replicas, of which some have one row and others several: the "
            f"plan would not be for all of them. Begin with a batch of {count} rows, or of {2 * count} or more"
        )
    own = [leaf.narrow(0, start, length) if _is_divided(leaf, rows) else leaf for leaf in leaves]
    positional, keywords = tree_unflatten(own, spec)
    return tuple(positional), dict(keywords)


def part_of(rows: int, index: int, count: int) -> tuple[int, int]:
    """The first row of replica ``index`` of ``count``, and how many it has. Raises :class:`OptionsError`, on all of
    them, for too few rows."""
    if rows < count:
        raise OptionsError(
            f"a batch of {rows} row{'s' if rows != 1 else ''} for {count} replicas: each replica trains on rows of its "
            f"own. Give global batches of {count} rows or more (drop_last=True leaves out a smaller last one), or "
            "another Options(sync=...) or mesh"
        )
    each, more = divmod(rows, count)
    return index * each + min(index, more), each + (index < more)


@dataclass(frozen=True)
class OwnPart:
    """Which of the samples of a batch are a replica's, of as many as are left when it is asked. In another process,
    such as a worker of a loader that reads a stream, it goes on as of the beginning."""

    members: Members

    def __call__(self, rows: int) -> tuple[int, int]:
        return part_of(rows, self.members.index, self.members.count)


def _rows(leaves: Sequence[Any]) -> int | None:
    """The length of dim 0 that most plain tensors share, as planning takes it (the first of several); None if there
    are no such tensors."""
    sizes = Counter(leaf.shape[0] for leaf in leaves if _is_plain(leaf))
    several = Counter({size: count for size, count in sizes.items() if size > 1}) or sizes
    return several.most_common(1)[0][0] if several else None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0


def _is_divided(leaf: Any, rows: int) -> bool:
    return _is_plain(leaf) and leaf.shape[0] == rows
