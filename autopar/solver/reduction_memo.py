"""What a reduction has looked at and found nothing to do, so that it is not looked at again."""

from __future__ import annotations

from .problem import Group, Transfer

_Mark = tuple[object, ...]


def _transfer_mark(transfer: Transfer) -> _Mark:
    """The arrays, and which ends are the same group: all that a reduction sees, whatever the groups' numbers are."""
    ends = (transfer.producer, *transfer.consumers)
    return (id(transfer.cost), id(transfer.source), *map(id, transfer.targets), *map(ends.index, ends))


class ReductionMemo:
    """Transfers, and groups with the transfers at them. They are known by their arrays: these are never written to, and
    a problem made of another keeps those that did not change."""

    def __init__(self) -> None:
        # The values keep the arrays, so that no other can get the number of one of them.
        self._known: dict[_Mark, object] = {}

    def __contains__(self, transfer: Transfer) -> bool:
        return _transfer_mark(transfer) in self._known

    def add(self, transfer: Transfer) -> None:
        self._known[_transfer_mark(transfer)] = transfer

    def has_group(self, index: int, group: Group, incident: list[Transfer]) -> bool:
        return self._group_mark(index, group, incident) in self._known

    def add_group(self, index: int, group: Group, incident: list[Transfer]) -> None:
        self._known[self._group_mark(index, group, incident)] = (group, incident)

    @staticmethod
    def _group_mark(index: int, group: Group, incident: list[Transfer]) -> _Mark:
        arrays = (group.cost, group.memory, group.temporary, group.host)
        ends = (tuple(end == index for end in (t.producer, *t.consumers)) for t in incident)
        return (*map(id, arrays), *map(_transfer_mark, incident), *ends)
