"""Finds choices of a group that another choice replaces at no loss, whatever the group's neighbours choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from .label_arrays import distinct, used
from .problem import Floats, Group, Ints, Problem, Transfer
from .reduction_memo import ReductionMemo

Mask = NDArray[np.bool_]
# How many differences are computed in one piece: about as many as fit into a processor's cache.
# Chosen: 1 MiB of float64.
_PIECE = 1 << 17


def undominated(problem: Problem, memo: ReductionMemo) -> tuple[list[Mask], list[Ints]]:
    """For each group, which choices to keep, and for every choice the one that represents it (itself if kept).

    Groups are treated one after another, each against the remaining choices of the others, so that every single removal
    is exact. Groups in ``memo`` are skipped: nothing could be removed from them, and they and their transfers have not
    changed since.
    """
    masks = [np.ones(len(group.cost), dtype=bool) for group in problem.groups]
    incident: list[list[Transfer]] = [[] for _ in problem.groups]
    for transfer in problem.transfers:
        for index in {transfer.producer, *transfer.consumers}:
            incident[index].append(transfer)
    substitutes = []
    for index, group in enumerate(problem.groups):
        substitute = np.arange(len(group.cost))
        # A transfer from a group to itself couples both its ends, but the bounds below vary one end at a time.
        looped = any(t.producer == index and index in t.consumers for t in incident[index])
        if len(group.cost) > 1 and not looped and not memo.has_group(index, group, incident[index]):
            substitute = _remove(_worst(group, index, incident[index], masks), masks[index])
            if masks[index].all():
                memo.add_group(index, group, incident[index])
        substitutes.append(substitute)
    return masks, substitutes


def _worst(group: Group, index: int, incident: list[Transfer], masks: list[Mask]) -> Floats:
    """[k, j]: a bound on how much the whole cost rises when group ``index`` takes j instead of k."""
    worst = _own(group)
    with np.errstate(invalid="ignore"):
        for transfer in incident:
            worst = _plus(worst, _worst_change(transfer, index, masks))
    return worst


def _plus(left: Floats, right: Floats) -> Floats:
    """The sum. A forbidden change (infinite) stays forbidden, whatever it gains elsewhere. Of infinities of both signs
    numpy would warn."""
    total = left + right
    undefined = np.isnan(total)
    if np.logical_or.reduce(undefined, axis=None):
        total[undefined] = np.inf
    return total


def _own(group: Group) -> Floats:
    """[k, j]: the change of the group's own cost when j replaces k; infinite where j needs more memory."""
    change = _difference(group.cost[None, :], group.cost[:, None])
    for need in (group.memory, group.temporary, group.host):
        if (need != need[0]).any():
            change[need[None, :] > need[:, None]] = np.inf
    return change


def _remove(worst: Floats, mask: Mask) -> Ints:
    """Clears dominated choices in ``mask`` one by one. Returns the choice that represents each."""
    np.fill_diagonal(worst, np.inf)
    substitute = np.arange(len(mask))
    dominates = worst <= 0
    for k in np.flatnonzero(dominates.any(axis=1)):
        better = np.flatnonzero(dominates[k] & mask)
        if len(better):
            mask[k] = False
            substitute[k] = better[np.argmin(worst[k, better])]
    for k in reversed(np.flatnonzero(~mask)):
        # The choice that replaced k may have been removed since, so follow its replacements.
        while not mask[substitute[k]]:
            substitute[k] = substitute[substitute[k]]
    return substitute


def _worst_change(transfer: Transfer, index: int, masks: list[Mask]) -> Floats:
    """[k, j]: a bound on how much the cost of the transfer rises when group ``index`` takes j instead of k."""
    if transfer.producer == index:
        columns = _used(transfer, range(len(transfer.consumers)), masks)
        return _by_label(
            transfer.source,
            len(transfer.cost),
            lambda rows: _row_change(transfer.cost[rows[:, None], columns], len(transfer.consumers)),
        )
    count = transfer.cost.shape[1]
    cost = transfer.cost[used(transfer.source[masks[transfer.producer]], len(transfer.cost))]
    slots = [c for c, consumer in enumerate(transfer.consumers) if consumer == index]
    others = [c for c, consumer in enumerate(transfer.consumers) if consumer != index]
    shared = np.zeros(count, dtype=bool)
    shared[_used(transfer, others, masks)] = True
    if len(slots) > 1:
        shared[:] = True
    total: Floats = np.zeros((len(masks[index]),) * 2)
    for slot in slots:
        change = _by_label(
            transfer.targets[slot], count, lambda columns: _column_change(cost[:, columns], shared[columns])
        )
        total = _plus(total, change)
    return total


def _used(transfer: Transfer, slots: Iterable[int], masks: list[Mask]) -> Ints:
    """The columns that the consumers in ``slots`` may need."""
    columns = [transfer.targets[c][masks[transfer.consumers[c]]] for c in slots]
    return used(np.concatenate([*columns, np.zeros(0, dtype=np.int64)]), transfer.cost.shape[1])


def _by_label(labels: Ints, count: int, change: Callable[[Ints], Floats]) -> Floats:
    """Evaluates ``change`` between distinct labels, and looks it up for every pair of choices."""
    values, position = distinct(labels, count)
    return change(values)[position[:, None], position[None, :]]


def _difference(new: Floats, old: Floats) -> Floats:
    """``new - old``. An infinite old cost never occurs in a solution, so every change from it is an improvement."""
    if np.isfinite(old).all():
        return new - old
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(old), -np.inf, new - old)


def _greatest(new: Floats, old: Floats, most: int = 1) -> Floats:
    """[a, b]: a bound on ``new[b] - old[a]``, summed over between one and ``most`` entries: the greatest difference,
    plus the next greatest ones if they are positive."""
    most = min(most, new.shape[1])
    greatest = np.empty((len(old), len(new)))
    step = max(1, _PIECE // max(new.size, 1))
    for start in range(0, len(old), step):
        if most == 1:
            # With the entries first, since numpy is slow at many short rows.
            some = np.ascontiguousarray(old[start : start + step].T)
            differences = _difference(np.ascontiguousarray(new.T)[:, None, :], some[:, :, None])
            np.maximum.reduce(differences, axis=0, out=greatest[start : start + step])
            continue
        differences = _difference(new[None], old[start : start + step, None])
        differences = -np.partition(-differences, most - 1, axis=2)[:, :, :most]
        differences.sort(axis=2)
        greatest[start : start + step] = differences[:, :, -1] + np.maximum(differences[:, :, :-1], 0.0).sum(axis=2)
    return greatest


def _row_change(cost: Floats, consumers: int) -> Floats:
    """[p, r]: the bound for a tensor that starts in row r instead of p. The consumers need between one and
    ``consumers`` distinct columns."""
    return _greatest(cost, cost, consumers)


def _column_change(cost: Floats, shared: Mask) -> Floats:
    """[q, r]: the bound for a consumer that needs column r instead of q. A column that another consumer may need as
    well saves nothing."""
    new = np.ascontiguousarray(cost.T)
    change = _greatest(new, np.where(shared[:, None] & np.isfinite(new), 0.0, new))
    np.fill_diagonal(change, 0.0)
    return change
