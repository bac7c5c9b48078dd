"""Remembers where a reduction found nothing to do, so that it is not tried there again."""

from __future__ import annotations

import numpy as np

from .problem import Floats, Group, Transfer

_Mark = tuple[object, ...]


def _transfer_mark(transfer: Transfer) -> _Mark:
    """The identities of the arrays, and which ends are the same group. A reduction depends on nothing else, in
    particular not on the groups' numbers."""
    ends = (transfer.producer, *transfer.consumers)
    return (id(transfer.cost), id(transfer.source), *map(id, transfer.targets), *map(ends.index, ends))


class ReductionMemo:
    """A set of transfers, and of groups with their transfers. They are identified by their arrays. Arrays are never
    written to, and a problem derived from another keeps the arrays that did not change."""

    def __init__(self) -> None:
        # The values keep the arrays alive, so that no new array can have the same id.
        self._seen: dict[_Mark, object] = {}

    def copy(self) -> ReductionMemo:
        """One that learns by itself from now on."""
        memo = ReductionMemo()
        memo._seen = dict(self._seen)
        return memo

    def __contains__(self, transfer: Transfer) -> bool:
        return _transfer_mark(transfer) in self._seen

    def add(self, transfer: Transfer) -> None:
        self._seen[_transfer_mark(transfer)] = transfer

    def has_group(self, index: int, group: Group, incident: list[Transfer]) -> bool:
        return self._group_mark(index, group, incident) in self._seen

    def add_group(self, index: int, group: Group, incident: list[Transfer]) -> None:
        self._seen[self._group_mark(index, group, incident)] = (group, incident)

    @staticmethod
    def _group_mark(index: int, group: Group, incident: list[Transfer]) -> _Mark:
        arrays = (group.cost, group.memory, group.temporary, group.host)
        ends = (tuple(end == index for end in (t.producer, *t.consumers)) for t in incident)
        return (*map(id, arrays), *map(_transfer_mark, incident), *ends)


class FiniteMemo:
    """The arrays of costs that were found to be finite throughout."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Floats, bool]] = {}  # With the array, as above.

    def copy(self) -> FiniteMemo:
        """As :meth:`ReductionMemo.copy`."""
        memo = FiniteMemo()
        memo._seen = dict(self._seen)
        return memo

    def has(self, cost: Floats) -> bool:
        if id(cost) not in self._seen:
            self._seen[id(cost)] = cost, bool(np.isfinite(cost).all())
        return self._seen[id(cost)][1]
