"""Which choices of a group another choice replaces at no loss, whatever its neighbours choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from .problem import Floats, Group, Ints, Problem, Transfer

Mask = NDArray[np.bool_]


def undominated(problem: Problem) -> tuple[list[Mask], list[Ints]]:
    """Per group which choices to keep, and for every choice the one that stands for it (itself if kept).

    Groups are treated one after another, each against what is left of the others, so that every single
    removal is exact.
    """
    masks = [np.ones(len(group.cost), dtype=bool) for group in problem.groups]
    incident: list[list[Transfer]] = [[] for _ in problem.groups]
    for transfer in problem.transfers:
        for index in {transfer.producer, *transfer.consumers}:
            incident[index].append(transfer)
    substitutes = []
    for index, group in enumerate(problem.groups):
        substitute = np.arange(len(group.cost))
        # A transfer from a group to itself couples both its ends: the bounds below take them one at a time.
        if not any(t.producer == index and index in t.consumers for t in incident[index]):
            worst = _own(group)
            for transfer in incident[index]:
                worst = _plus(worst, _worst_change(transfer, index, masks))
            substitute = _remove(worst, masks[index])
        substitutes.append(substitute)
    return masks, substitutes


def _plus(left: Floats, right: Floats) -> Floats:
    """The sum, where a forbidden change (infinite) stays forbidden whatever else it gains."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isposinf(left) | np.isposinf(right), np.inf, left + right)


def _own(group: Group) -> Floats:
    """[k, j] change of cost when j replaces k; infinite where j needs more memory."""
    needs = (group.memory, group.temporary, group.host)
    more = np.any([need[None, :] > need[:, None] for need in needs], axis=0)
    return np.where(more, np.inf, _difference(group.cost[None, :], group.cost[:, None]))


def _remove(worst: Floats, mask: Mask) -> Ints:
    """Clears dominated choices in ``mask`` one by one and says what stands for each."""
    np.fill_diagonal(worst, np.inf)
    substitute = np.arange(len(mask))
    dominates = worst <= 0
    for k in np.flatnonzero(dominates.any(axis=1)):
        better = np.flatnonzero(dominates[k] & mask)
        if len(better):
            mask[k] = False
            substitute[k] = better[np.argmin(worst[k, better])]
    for k in reversed(np.flatnonzero(~mask)):
        # The one that replaced k was kept then, and may have been removed since: follow it.
        while not mask[substitute[k]]:
            substitute[k] = substitute[substitute[k]]
    return substitute


def _worst_change(transfer: Transfer, index: int, masks: list[Mask]) -> Floats:
    """[k, j] bound on how much dearer the transfer gets when group ``index`` takes j instead of k."""
    if transfer.producer == index:
        columns = _used(transfer, range(len(transfer.consumers)), masks)
        return _by_label(
            transfer.source,
            lambda rows: _row_change(transfer.cost[np.ix_(rows, columns)], len(transfer.consumers)),
        )
    rows = np.unique(transfer.source[masks[transfer.producer]])
    cost = transfer.cost[rows]
    slots = [c for c, consumer in enumerate(transfer.consumers) if consumer == index]
    others = [c for c, consumer in enumerate(transfer.consumers) if consumer != index]
    shared = np.zeros(cost.shape[1], dtype=bool)
    shared[_used(transfer, others, masks)] = True
    if len(slots) > 1:
        shared[:] = True
    total: Floats = np.zeros((len(masks[index]),) * 2)
    for slot in slots:
        change = _by_label(transfer.targets[slot], lambda columns: _column_change(cost[:, columns], shared[columns]))
        total = _plus(total, change)
    return total


def _used(transfer: Transfer, slots: Iterable[int], masks: list[Mask]) -> Ints:
    found = [transfer.targets[c][masks[transfer.consumers[c]]] for c in slots]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)


def _by_label(labels: Ints, change: Callable[[Ints], Floats]) -> Floats:
    """``change`` between distinct labels, read for every pair of choices."""
    distinct, inverse = np.unique(labels, return_inverse=True)
    table = change(distinct)
    return table[np.ix_(inverse, inverse)]


def _difference(new: Floats, old: Floats) -> Floats:
    """``new - old`` where an old cost that is infinite never occurs, so that anything is better."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(old), -np.inf, new - old)


def _row_change(cost: Floats, consumers: int) -> Floats:
    """[p, r] bound when the tensor starts in row r instead of p: the consumers need between one and
    ``consumers`` distinct columns."""
    change = np.empty((len(cost), len(cost)))
    for p, old in enumerate(cost):
        each = _difference(cost, old[None, :])
        if consumers == 1:
            change[p] = each.max(axis=1)
            continue
        most = -np.partition(-each, min(consumers, each.shape[1]) - 1, axis=1)[:, : min(consumers, each.shape[1])]
        most.sort(axis=1)
        change[p] = most[:, -1] + np.maximum(most[:, :-1], 0.0).sum(axis=1)
    return change


def _column_change(cost: Floats, shared: Mask) -> Floats:
    """[q, r] bound when a consumer needs column r instead of q; a column another consumer may need as well
    saves nothing."""
    columns = cost.shape[1]
    change = np.empty((columns, columns))
    for q in range(columns):
        old = np.where(np.isinf(cost[:, q]), np.inf, 0.0) if shared[q] else cost[:, q]
        change[q] = _difference(cost, old[:, None]).max(axis=0)
        change[q, q] = 0.0
    return change
