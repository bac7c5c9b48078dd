"""Transfers rewritten to the least they can say, without touching groups or choices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .problem import Floats, Ints, Problem, Transfer


@dataclass
class _Work:
    """A problem being rewritten: unary costs change in place, finished transfers pile up."""

    costs: list[Floats]
    done: list[Transfer]


def simplify(problem: Problem) -> Problem:
    """See :class:`autopar.reduce.SimplifyTransfers`."""
    work = _Work([group.cost.copy() for group in problem.groups], [])
    for transfer in problem.transfers:
        fixed = _without_fixed_consumers(work, _distinct_consumers(transfer))
        for part in _independent_parts(fixed):
            _finish(work, _as_pair(part))
    groups = tuple(replace(g, cost=cost) for g, cost in zip(problem.groups, work.costs, strict=True))
    return replace(problem, groups=groups, transfers=tuple(work.done))


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
    fixed = {int(t[0]) for t in transfer.targets if (t == t[0]).all()}
    if not fixed:
        return transfer
    columns = sorted(fixed)
    work.costs[transfer.producer] += transfer.cost[transfer.source][:, columns].sum(axis=1)
    cost = transfer.cost.copy()
    # What is forbidden for the producer now costs it infinitely; the rest of the column is paid.
    cost[:, columns] = 0.0
    slots = [c for c, t in enumerate(transfer.targets) if not (t == t[0]).all()]
    return replace(_only(transfer, slots), cost=cost)


def _independent_parts(transfer: Transfer) -> list[Transfer]:
    """Consumers that can share no column with a price need not stay in one transfer; those that need no such
    column go."""
    priced = (transfer.cost[np.unique(transfer.source)] != 0).any(axis=0)
    parts: list[tuple[set[int], list[int]]] = []
    for c, target in enumerate(transfer.targets):
        columns = {int(q) for q in np.unique(target) if priced[q]}
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
    rows = np.unique(transfer.source)
    if len(transfer.consumers) == 1:
        consumer, target = transfer.consumers[0], transfer.targets[0]
        if consumer == transfer.producer:
            work.costs[consumer] += transfer.cost[transfer.source, target]
            return
        if len(rows) == 1:
            work.costs[consumer] += transfer.cost[rows[0], target]
            return
    merged = _merge_columns(_merge_rows(transfer))
    if len(merged.cost) == 1 and len(merged.consumers) == 1:
        work.costs[merged.consumers[0]] += merged.cost[0, merged.targets[0]]
    elif merged.cost.shape[1] == 1 and len(merged.consumers) == 1:
        work.costs[merged.producer] += merged.cost[merged.source, 0]
    else:
        work.done.append(merged)


def _merge_rows(transfer: Transfer) -> Transfer:
    rows, source = np.unique(transfer.source, return_inverse=True)
    columns = np.unique(np.concatenate(transfer.targets))
    position: Ints = np.zeros(transfer.cost.shape[1], dtype=np.int64)
    position[columns] = np.arange(len(columns))
    cost, merged = np.unique(transfer.cost[np.ix_(rows, columns)], axis=0, return_inverse=True)
    targets = tuple(position[target] for target in transfer.targets)
    return replace(transfer, source=merged.reshape(-1)[source], targets=targets, cost=cost)


def _merge_columns(transfer: Transfer) -> Transfer:
    """Equal columns merge if one consumer chooses among them; with several, only free ones do (two equal
    prices are paid twice)."""
    if len(transfer.consumers) == 1:
        cost, merged = np.unique(transfer.cost, axis=1, return_inverse=True)
    else:
        free = ~(transfer.cost != 0).any(axis=0)
        label = np.where(free, -1, np.arange(len(free)))
        _, first, merged = np.unique(label, return_index=True, return_inverse=True)
        cost = transfer.cost[:, first]
    merged = merged.reshape(-1)
    return replace(transfer, targets=tuple(merged[target] for target in transfer.targets), cost=cost)
