"""Transfers rewritten to the least they can say, without touching groups or choices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .label_arrays import distinct, equal_rows, used
from .problem import Floats, Ints, Problem, Transfer
from .reduction_memo import ReductionMemo


@dataclass
class _Work:
    """A problem being rewritten: unary costs are exchanged for new ones, finished transfers pile up."""

    costs: list[Floats]
    done: list[Transfer]

    def charge(self, group: int, cost: Floats) -> None:
        """Adds to the cost of a group; arrays that other problems share stay as they are."""
        if cost.any():
            self.costs[group] = self.costs[group] + cost


def simplify(problem: Problem, memo: ReductionMemo) -> Problem:
    """See :class:`autopar.solver.reduce.SimplifyTransfers`; ``memo`` are transfers that were found to be so
    before."""
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
    """Whether ``parts``, what became of ``transfer``, are nothing but that: whatever is simplified has fewer consumers,
    rows or columns, or becomes the cost of groups."""
    return len(parts) == 1 and parts[0].consumers == transfer.consumers and parts[0].cost.shape == transfer.cost.shape


def _only(transfer: Transfer, slots: list[int]) -> Transfer:
    return replace(
        transfer,
        consumers=tuple(transfer.consumers[c] for c in slots),
        targets=tuple(transfer.targets[c] for c in slots),
    )


def _distinct_consumers(transfer: Transfer) -> Transfer:
    """One slot per (group, columns)."""
    seen: dict[tuple[int, bytes], int] = {}
    for c, (consumer, target) in enumerate(zip(transfer.consumers, transfer.targets, strict=True)):
        seen.setdefault((consumer, target.tobytes()), c)
    return transfer if len(seen) == len(transfer.consumers) else _only(transfer, list(seen.values()))


def _without_fixed_consumers(work: _Work, transfer: Transfer) -> Transfer:
    """A column some consumer needs whatever it chooses is the producer's to pay, and then free for all."""
    slots = [c for c, target in enumerate(transfer.targets) if not (target == target[0]).all()]
    if len(slots) == len(transfer.targets):
        return transfer
    columns = sorted({int(target[0]) for c, target in enumerate(transfer.targets) if c not in slots})
    work.charge(transfer.producer, transfer.cost[transfer.source][:, columns].sum(axis=1))
    cost = transfer.cost.copy()
    # What is forbidden for the producer now costs it infinitely; the rest of the column is paid.
    cost[:, columns] = 0.0
    return replace(_only(transfer, slots), cost=cost)


def _independent_parts(transfer: Transfer) -> list[Transfer]:
    """Consumers that can share no column with a price need not stay in one transfer; those that need no such
    column go."""
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
        for other in [part for part in parts if part[0] & columns]:
            parts.remove(other)
            columns |= other[0]
            slots += other[1]
        parts.append((columns, sorted(slots)))
    return [transfer if len(slots) == len(transfer.consumers) else _only(transfer, slots) for _, slots in parts]


def _as_pair(transfer: Transfer) -> Transfer:
    """Several slots of one group become one: its columns are the sets of columns needed together."""
    if len(transfer.consumers) == 1 or len(set(transfer.consumers)) > 1:
        return transfer
    needed, target = np.unique(np.stack(transfer.targets), axis=1, return_inverse=True)
    cost = np.stack([transfer.cost[:, np.unique(column)].sum(axis=1) for column in needed.T], axis=1)
    return replace(transfer, consumers=transfer.consumers[:1], targets=(target.reshape(-1),), cost=cost)


def _finish(work: _Work, transfer: Transfer) -> None:
    """Moves what only one group decides into its cost, else keeps the transfer with equal rows and columns
    merged."""
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
    cost = transfer.cost[np.ix_(rows, columns)]
    first, merged = equal_rows(cost)
    targets = tuple(np.split(target, np.cumsum([len(one) for one in transfer.targets])[:-1]))
    return replace(transfer, source=merged[source], targets=targets, cost=cost[first])


def _merge_columns(transfer: Transfer) -> Transfer:
    """Equal columns merge if one consumer chooses among them; with several, only free ones do (two equal
    prices are paid twice)."""
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
