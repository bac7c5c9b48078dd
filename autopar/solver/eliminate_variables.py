"""Min-plus elimination of groups that share transfers with at most two other groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .label_arrays import distinct
from .problem import Floats, Ints, Problem, Transfer


@dataclass(frozen=True, eq=False)
class Fold:
    """How an eliminated group chooses: it takes the choice k with the least sum of its own cost and
    ``tables[n][label of neighbour n, k]``."""

    group: int
    cost: Floats
    neighbours: tuple[int, ...]
    labels: tuple[Ints, ...]
    tables: tuple[Floats, ...]

    def best(self, choices: Ints) -> int:
        total = self.cost.copy()
        for neighbour, label, table in zip(self.neighbours, self.labels, self.tables, strict=True):
            total += table[label[choices[neighbour]]]
        return int(np.argmin(total))


@dataclass
class _Work:
    costs: list[Floats]
    movable: list[bool]
    transfers: dict[int, Transfer]
    incident: list[set[int]]
    fresh: int
    folds: list[Fold] = field(default_factory=list)
    offset: float = 0.0


def eliminate(problem: Problem) -> tuple[Problem, Ints, list[Fold], float]:
    """Returns the smaller problem, the old indices of its groups, the folds in order, and by how much the objective
    decreased."""
    work = _start(problem)
    waiting = sorted(range(len(problem.groups)), key=lambda g: (len(work.incident[g]), g), reverse=True)
    eliminated = set()
    while waiting:
        group = waiting.pop()
        if group in eliminated or not work.movable[group]:
            continue
        fold = _fold(work, group)
        if fold is None:
            continue
        eliminated.add(group)
        work.folds.append(fold)
        _replace(work, fold)
        waiting.extend(n for n in reversed(fold.neighbours) if n not in eliminated)
    return _finish(problem, work, eliminated)


def _start(problem: Problem) -> _Work:
    incident: list[set[int]] = [set() for _ in problem.groups]
    for t, transfer in enumerate(problem.transfers):
        for group in (transfer.producer, *transfer.consumers):
            incident[group].add(t)
    movable = [not (group.memory.any() or group.temporary.any() or group.host.any()) for group in problem.groups]
    costs = [group.cost for group in problem.groups]
    return _Work(costs, movable, dict(enumerate(problem.transfers)), incident, len(problem.transfers))


def _ends(transfer: Transfer, group: int) -> tuple[int, Ints, Ints, Floats]:
    """The other end of a pair, its labels, the labels of ``group``, and the cost [other's label, group's
    label]."""
    if transfer.producer == group:
        return transfer.consumers[0], transfer.targets[0], transfer.source, transfer.cost.T
    return transfer.producer, transfer.source, transfer.targets[0], transfer.cost


def _fold(work: _Work, group: int) -> Fold | None:
    """The fold of ``group``, or None if it must stay."""
    transfers = [work.transfers[t] for t in sorted(work.incident[group])]
    if any(len(t.consumers) != 1 or t.consumers[0] == t.producer for t in transfers):
        return None
    ends: dict[int, list[tuple[int, Ints, Ints, Floats]]] = {}
    for transfer in transfers:
        end = _ends(transfer, group)
        ends.setdefault(end[0], []).append(end)
    if len(ends) > 2 and len(work.costs[group]) > 1:
        return None
    labels, tables = [], []
    for parallel in ends.values():
        rows, label = _together([end[1] for end in parallel], [len(end[3]) for end in parallel])
        labels.append(label)
        tables.append(sum((e[3][own][:, e[2]] for e, own in zip(parallel, rows, strict=True)), np.zeros(())))
    before = sum(transfer.cost.size for transfer in transfers)
    # A table over two neighbours with many labels could be far larger than the transfers that it replaces.
    # Twice as large, and small ones always: chosen, not measured.
    if len(tables) == 2 and len(tables[0]) * len(tables[1]) > 2 * before + 64:
        return None
    return Fold(group, work.costs[group], tuple(ends), tuple(labels), tuple(tables))


def _together(labels: list[Ints], counts: list[int]) -> tuple[Sequence[Ints], Ints]:
    """The distinct combinations of ``labels``, below ``counts``, in ascending order, and for each choice its
    combination."""
    if len(labels) == 1:
        values, label = distinct(labels[0], counts[0])
        return [values], label
    values, label = np.unique(np.stack(labels), axis=1, return_inverse=True)
    return list(values), label.reshape(-1)


def _replace(work: _Work, fold: Fold) -> None:
    for t in sorted(work.incident[fold.group]):
        transfer = work.transfers.pop(t)
        for end in (transfer.producer, *transfer.consumers):
            work.incident[end].discard(t)
    if not fold.tables:
        work.offset += float(fold.cost.min())
    elif len(fold.tables) == 2 and len(fold.cost) > 1:
        _join(work, fold)
    else:
        # A group with a single choice does not couple its neighbours.
        work.offset += 0.0 if len(fold.tables) == 1 else float(fold.cost[0])
        own = fold.cost if len(fold.tables) == 1 else np.zeros(1)
        for neighbour, label, table in zip(fold.neighbours, fold.labels, fold.tables, strict=True):
            work.costs[neighbour] = work.costs[neighbour] + (table + own).min(axis=1)[label]


def _join(work: _Work, fold: Fold) -> None:
    left, right = fold.tables
    cost = np.full((len(left), len(right)), np.inf)
    for k, own in enumerate(fold.cost):
        np.minimum(cost, (left[:, k, None] + own) + right[None, :, k], out=cost)
    base = float(cost.min())
    if np.isfinite(base):
        work.offset += base
        cost -= base
    a, b = fold.neighbours
    work.transfers[work.fresh] = Transfer(
        name=f"fold{fold.group}",
        producer=a,
        source=fold.labels[0],
        consumers=(b,),
        targets=(fold.labels[1],),
        cost=cost,
    )
    work.incident[a].add(work.fresh)
    work.incident[b].add(work.fresh)
    work.fresh += 1


def _finish(problem: Problem, work: _Work, eliminated: set[int]) -> tuple[Problem, Ints, list[Fold], float]:
    remaining = np.array([g for g in range(len(problem.groups)) if g not in eliminated], dtype=np.int64)
    position = {int(g): n for n, g in enumerate(remaining)}
    costs = [(problem.groups[g], work.costs[g]) for g in remaining]
    groups = tuple(group if cost is group.cost else replace(group, cost=cost) for group, cost in costs)
    transfers = tuple(
        replace(t, producer=position[t.producer], consumers=tuple(position[c] for c in t.consumers))
        for _, t in sorted(work.transfers.items())
    )
    return replace(problem, groups=groups, transfers=transfers), remaining, work.folds, work.offset
