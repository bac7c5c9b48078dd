"""Rewrites transfers to their smallest form, without changing groups or choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from .label_arrays import distinct, equal_rows, used
from .problem import Floats, Ints, Problem, Transfer
from .reduction_memo import ReductionMemo


@dataclass
class _Work:
    """A problem being rewritten: the costs of groups so far, and the transfers that are done."""

    costs: list[Floats]
    done: list[Transfer]

    def charge(self, group: int, cost: Floats) -> None:
        """Adds to the cost of a group. Makes a new array, since other problems may share the old one."""
        if cost.any():
            self.costs[group] = self.costs[group] + cost


def simplify(problem: Problem, memo: ReductionMemo) -> Problem:
    """See :class:`autopar.solver.reduce.SimplifyTransfers`. ``memo``: transfers already known to be in their smallest
    form."""
    work = _Work([group.cost for group in problem.groups], [])
    for transfer in problem.transfers:
        if transfer in memo:
            work.done.append(transfer)
            continue
        before = len(work.done)
        for part in _independent_parts(_without_fixed_consumers(work, _distinct_consumers(transfer))):
            _finish(work, _as_pair(part))
        if _is_as_before(work.done[before:], transfer):
            work.done[before:] = [transfer]
            memo.add(transfer)
    groups = tuple(
        group if cost is group.cost else replace(group, cost=cost)
        for group, cost in zip(problem.groups, work.costs, strict=True)
    )
    return replace(problem, groups=groups, transfers=tuple(work.done))


def _is_as_before(parts: list[Transfer], transfer: Transfer) -> bool:
    """Whether ``parts``, the rewritten ``transfer``, are just that transfer. A transfer that was simplified has fewer
    consumers, rows or columns, or has become a cost of groups."""
    return len(parts) == 1 and parts[0].consumers == transfer.consumers and parts[0].cost.shape == transfer.cost.shape


def _only(transfer: Transfer, slots: list[int]) -> Transfer:
    return replace(
        transfer,
        consumers=tuple(transfer.consumers[c] for c in slots),
        targets=tuple(transfer.targets[c] for c in slots),
    )


def _distinct_consumers(transfer: Transfer) -> Transfer:
    """The transfer with one slot per (group, columns)."""
    seen: dict[tuple[int, bytes], int] = {}
    for c, (consumer, target) in enumerate(zip(transfer.consumers, transfer.targets, strict=True)):
        seen.setdefault((consumer, target.tobytes()), c)
    return transfer if len(seen) == len(transfer.consumers) else _only(transfer, list(seen.values()))


def _without_fixed_consumers(work: _Work, transfer: Transfer) -> Transfer:
    """Charges columns that some consumer needs, whatever it chooses, to the producer. They are then free for all."""
    slots = [c for c, target in enumerate(transfer.targets) if not (target == target[0]).all()]
    if len(slots) == len(transfer.targets):
        return transfer
    columns = sorted({int(target[0]) for c, target in enumerate(transfer.targets) if c not in slots})
    work.charge(transfer.producer, transfer.cost[transfer.source][:, columns].sum(axis=1))
    cost = transfer.cost.copy()
    # Forbidden entries are now infinite costs of the producer; the other entries of the column are paid.
    cost[:, columns] = 0.0
    return replace(_only(transfer, slots), cost=cost)


def _independent_parts(transfer: Transfer) -> list[Transfer]:
    """Splits a transfer into parts whose consumers share no priced column. Consumers that need no priced column are
    dropped."""
    rows, count = used(transfer.source, len(transfer.cost)), transfer.cost.shape[1]
    priced = (transfer.cost[rows] != 0).any(axis=0)
    if len(transfer.targets) == 1:
        return [transfer] if priced[transfer.targets[0]].any() else []
    parts: list[tuple[set[int], list[int]]] = []
    for c, target in enumerate(transfer.targets):
        needed = used(target, count)
        columns = set(needed[priced[needed]].tolist())
        if not columns:
            continue
        slots = [c]
        for overlapping in [part for part in parts if part[0] & columns]:
            parts.remove(overlapping)
            columns |= overlapping[0]
            slots += overlapping[1]
        parts.append((columns, sorted(slots)))
    return [transfer if len(slots) == len(transfer.consumers) else _only(transfer, slots) for _, slots in parts]


def _as_pair(transfer: Transfer) -> Transfer:
    """Merges several slots of one group into one, whose columns are the sets of columns needed together."""
    if len(transfer.consumers) == 1 or len(set(transfer.consumers)) > 1:
        return transfer
    needed, target = np.unique(np.stack(transfer.targets), axis=1, return_inverse=True)
    cost = np.stack([transfer.cost[:, np.unique(column)].sum(axis=1) for column in needed.T], axis=1)
    return replace(transfer, consumers=transfer.consumers[:1], targets=(target.reshape(-1),), cost=cost)


def _finish(work: _Work, transfer: Transfer) -> None:
    """Moves a transfer that depends on one group alone into that group's cost. Otherwise keeps it, with equal rows and
    columns merged."""
    if len(transfer.consumers) == 1:
        consumer, target = transfer.consumers[0], transfer.targets[0]
        if consumer == transfer.producer:
            work.charge(consumer, transfer.cost[transfer.source, target])
            return
        if (transfer.source == transfer.source[0]).all():
            work.charge(consumer, transfer.cost[transfer.source[0], target])
            return
    merged = _merge_columns(_merge_rows(transfer))
    if len(merged.cost) == 1 and len(merged.consumers) == 1:
        work.charge(merged.consumers[0], merged.cost[0, merged.targets[0]])
    elif merged.cost.shape[1] == 1 and len(merged.consumers) == 1:
        work.charge(merged.producer, merged.cost[merged.source, 0])
    else:
        work.done.append(merged)


def _merge_rows(transfer: Transfer) -> Transfer:
    rows, source = distinct(transfer.source, len(transfer.cost))
    columns, target = distinct(np.concatenate(transfer.targets), transfer.cost.shape[1])
    cost = transfer.cost[rows[:, None], columns]
    first, merged = equal_rows(cost)
    ends = accumulate(map(len, transfer.targets), initial=0)
    targets = tuple(target[start:end] for start, end in pairwise(ends))
    return replace(transfer, source=merged[source], targets=targets, cost=cost[first])


def _merge_columns(transfer: Transfer) -> Transfer:
    """Merges equal columns if there is one consumer. With several consumers, merges only free columns, because two
    equal prices are paid twice."""
    if len(transfer.consumers) == 1:
        first, merged = equal_rows(transfer.cost.T)
    else:
        priced = (transfer.cost != 0).any(axis=0)
        free = np.flatnonzero(~priced)
        if len(free) < 2:
            return transfer
        label: Ints = np.arange(len(priced))
        label[free] = free[0]
        first, merged = distinct(label, len(priced))
    return replace(transfer, targets=tuple(merged[target] for target in transfer.targets), cost=transfer.cost[:, first])
