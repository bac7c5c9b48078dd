"""The integer program of a problem as arrays. Adding variables one by one in Python would take longer than solving.

Rows have no names while solving; :func:`autopar.solver.named_export.export` adds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Floats, Ints, Problem, Transfer

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class MixedIntegerProgram:
    """The program: minimise ``cost`` v subject to ``lower`` <= A v <= ``upper``, v >= 0, and v binary where ``binary``.

    A has entries ``value`` at (``row``, ``column``). x[i,k] is variable ``first[i] + k``. ``families`` are
    (name, labels) of successive rows, where the labels are indices into the problem: group, or (transfer, slot,
    row or column), or (transfer, slot, row, column) for ``shared``. ``unit`` seconds are 1 in ``cost``,
    ``memory_unit`` bytes are 1 in the memory rows.
    """

    cost: Floats
    binary: Mask
    lower: Floats
    upper: Floats
    row: Ints
    column: Ints
    value: Floats
    first: Ints
    families: tuple[tuple[str, Ints], ...]
    unit: float
    memory_unit: float


class _Builder:
    """Collects variables, rows and entries block by block."""

    def __init__(self) -> None:
        self.costs: list[Floats] = []
        self.variables = 0
        self.rows = 0
        self.lower: list[Floats] = []
        self.upper: list[Floats] = []
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.families: list[tuple[str, Ints]] = []
        self.memory_unit = 1.0

    def add_variables(self, cost: Floats) -> int:
        self.costs.append(cost)
        self.variables += len(cost)
        return self.variables - len(cost)

    def add_rows(self, name: str, labels: Ints, lower: float, upper: float) -> int:
        self.lower.append(np.full(len(labels), lower))
        self.upper.append(np.full(len(labels), upper))
        self.families.append((name, labels))
        self.rows += len(labels)
        return self.rows - len(labels)

    def add_entries(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        self.entries.append((rows, columns, np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape)))


def build(problem: Problem, objective: str = "cost") -> MixedIntegerProgram:
    """The program in the docstring of :mod:`autopar.solver.problem`; ``objective`` "memory" minimises peak bytes
    instead of seconds."""
    builder = _Builder()
    sizes = np.array([len(group.cost) for group in problem.groups], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    by_memory = objective == "memory"
    own = np.concatenate([g.memory if by_memory else g.cost for g in problem.groups])
    builder.add_variables(own)
    count = int(sizes.sum())
    row = builder.add_rows("one_choice", np.arange(len(sizes)), 1.0, 1.0)
    builder.add_entries(row + np.repeat(np.arange(len(sizes)), sizes), np.arange(count), 1.0)
    ends = [builder.variables]
    for t, transfer in enumerate(problem.transfers):
        _add_transfer(builder, t, transfer, first, priced=not by_memory)
        ends.append(builder.variables)
    _add_memory(builder, problem, first, by_memory)
    _add_host(builder, problem)
    if problem.windows and not by_memory:
        _add_windows(builder, problem, first, ends)
    return _finish(builder, first, count)


def nonzeros(problem: Problem) -> int:
    """The entries that :func:`build` writes for a problem without windows, which is much sooner known than they are."""
    groups = problem.groups
    count = sum(len(group.cost) for group in groups) + sum(map(_entries_of, problem.transfers))
    if np.isfinite(problem.memory_limit):
        count += 1 + sum(int(np.count_nonzero(group.memory)) for group in groups)
        binding = [group.temporary for group in groups if group.temporary.max() > 0]
        count += len(binding) + sum(int(np.count_nonzero(temporary)) for temporary in binding)
    if np.isfinite(problem.host_limit):
        count += sum(int(np.count_nonzero(group.host)) for group in groups)
    return count


def _entries_of(transfer: Transfer) -> int:
    """The entries that :func:`_add_transfer` writes."""
    rows = np.unique(transfer.source)
    finite, positive = np.isfinite(transfer.cost[rows]), transfer.cost[rows] > 0
    shared = (_users(transfer) > 1) & (transfer.cost > 0).any(axis=0)
    count = 0
    for target in transfer.targets:
        used = np.zeros(transfer.cost.shape[1], dtype=bool)
        used[target] = True
        paid = finite & positive & (used & shared)
        count += len(transfer.source) + len(target) + 2 * int(finite[:, used].sum()) + 2 * int(paid.sum())
    return count


def _add_windows(builder: _Builder, problem: Problem, first: Ints, ends: list[int]) -> None:
    """Adds ``exposed`` rows. The variables of transfer t are ``ends[t]`` up to ``ends[t + 1]``. Seconds that may be
    hidden are no longer priced themselves; the exposed part of them is priced instead. These rows have their own unit,
    to which :func:`_finish` scales the prices: in seconds, solver tolerances would be as large as the exposed part."""
    full = np.concatenate(builder.costs)
    left, unit = full.copy(), _unit(full)
    price = np.full(len(problem.windows), unit)
    exposed = builder.add_variables(price)
    rows = builder.add_rows("exposed", np.arange(len(problem.windows)), 0.0, np.inf)
    for w, window in enumerate(problem.windows):
        for t, part in window.transfers.items():
            sent = np.arange(ends[t], ends[t + 1])
            builder.add_entries(np.full(len(sent), rows + w), sent, -window.hidden * part * full[sent] / unit)
            left[sent] -= window.hidden * part * full[sent]
        for g, part in window.groups.items():
            own = first[g] + np.arange(len(problem.groups[g].cost))
            builder.add_entries(np.full(len(own), rows + w), own, window.hidden * part * full[own] / unit)
        builder.add_entries(np.array([rows + w]), np.array([exposed + w]), 1.0)
    builder.costs = [np.maximum(left, 0.0), price]


def _add_transfer(builder: _Builder, t: int, transfer: Transfer, first: Ints, priced: bool) -> None:
    users = _users(transfer)
    # A column with a single user is priced at its e. A column with several users is priced once, by z >= e of every
    # user.
    shared = (users > 1) & (transfer.cost > 0).any(axis=0) if priced else np.zeros(len(users), dtype=bool)
    z = np.full(transfer.cost.shape, -1, dtype=np.int64)
    rows_used = np.zeros(len(transfer.cost), dtype=bool)
    rows_used[transfer.source] = True
    pays = shared[None, :] & rows_used[:, None] & (transfer.cost > 0) & np.isfinite(transfer.cost)
    z[pays] = builder.add_variables(transfer.cost[pays]) + np.arange(int(pays.sum()))
    for c, target in enumerate(transfer.targets):
        used = np.zeros(len(users), dtype=bool)
        used[target] = True
        p, q = np.nonzero(np.isfinite(transfer.cost) & rows_used[:, None] & used[None, :])
        cost = np.where(shared[q], 0.0, transfer.cost[p, q]) if priced else np.zeros(len(p))
        e = builder.add_variables(cost) + np.arange(len(p))
        _add_ends(builder, t, c, transfer, first, (p, q, e))
        paid = pays[p, q]
        labels = np.concatenate([_labels(t, c, p[paid]), q[paid, None]], axis=1)
        row = builder.add_rows("shared", labels, 0.0, np.inf) + np.arange(len(labels))
        builder.add_entries(row, z[p[paid], q[paid]], 1.0)
        builder.add_entries(row, e[paid], -1.0)


def _users(transfer: Transfer) -> Ints:
    users = np.zeros(transfer.cost.shape[1], dtype=np.int64)
    for target in transfer.targets:
        users[np.unique(target)] += 1
    return users


def _labels(t: int, c: int, ends: Ints) -> Ints:
    return np.stack([np.full(len(ends), t), np.full(len(ends), c), ends], axis=1)


def _add_ends(
    builder: _Builder, t: int, c: int, transfer: Transfer, first: Ints, edge: tuple[Ints, Ints, Ints]
) -> None:
    """Adds the rows by which row sums of e equal the producer's choice, and column sums the consumer's."""
    p, q, e = edge
    consumer = transfer.consumers[c]
    ends = (
        ("leaves_row", p, transfer.source, first[transfer.producer]),
        ("enters_column", q, transfer.targets[c], first[consumer]),
    )
    for name, end, labels, start in ends:
        distinct, position = np.unique(labels, return_inverse=True)
        row = builder.add_rows(name, _labels(t, c, distinct), 0.0, 0.0)
        builder.add_entries(row + position, start + np.arange(len(labels)), -1.0)
        builder.add_entries(row + np.searchsorted(distinct, end), e, 1.0)


def _add_memory(builder: _Builder, problem: Problem, first: Ints, by_memory: bool) -> None:
    """Adds ``memory`` and ``temporary`` rows, in units of the memory that ``memory_fixed`` leaves."""
    limited = bool(np.isfinite(problem.memory_limit))
    if not (limited or by_memory):
        return
    total = np.concatenate([g.memory for g in problem.groups])
    spare = problem.memory_limit - problem.memory_fixed
    scale = sum(float(g.memory.max() + g.temporary.max()) for g in problem.groups) if by_memory else spare
    builder.memory_unit = unit = max(scale, 1.0) / 100
    peak = builder.add_variables(np.array([unit if by_memory else 0.0]))
    if limited:
        row = builder.add_rows("memory", np.zeros(1, dtype=np.int64), -np.inf, spare / unit)
        used = np.flatnonzero(total)
        builder.add_entries(np.full(len(used), row), used, total[used] / unit)
        builder.add_entries(np.array([row]), np.array([peak]), 1.0)
    binding = np.array([g for g, group in enumerate(problem.groups) if group.temporary.max() > 0], dtype=np.int64)
    rows = builder.add_rows("temporary", binding, 0.0, np.inf) + np.arange(len(binding))
    builder.add_entries(rows, np.full(len(rows), peak), 1.0)
    for line, g in zip(rows, binding, strict=True):
        temporary = problem.groups[g].temporary
        k = np.flatnonzero(temporary)
        builder.add_entries(np.full(len(k), line), first[g] + k, -temporary[k] / unit)


def host_unit(problem: Problem) -> float:
    """Bytes that are 1 in the ``host`` row."""
    return max(problem.host_limit, 1.0) / 100


def _add_host(builder: _Builder, problem: Problem) -> None:
    """Adds the ``host`` row."""
    if np.isinf(problem.host_limit):
        return
    total, unit = np.concatenate([g.host for g in problem.groups]), host_unit(problem)
    row = builder.add_rows("host", np.zeros(1, dtype=np.int64), -np.inf, problem.host_limit / unit)
    used = np.flatnonzero(total)
    builder.add_entries(np.full(len(used), row), used, total[used] / unit)


def _unit(cost: Floats) -> float:
    """The seconds that are 1 to a solver. Solver tolerances are absolute; in this unit, prices are at most 1000."""
    return max(float(np.abs(cost).max(initial=0.0)) / 1e3, 1e-300)


def _finish(builder: _Builder, first: Ints, count: int) -> MixedIntegerProgram:
    row = np.concatenate([entry[0] for entry in builder.entries])
    column = np.concatenate([entry[1] for entry in builder.entries])
    value = np.concatenate([entry[2] for entry in builder.entries])
    order = np.lexsort((column, row))
    cost = np.concatenate(builder.costs)
    unit = _unit(cost)
    binary = np.zeros(builder.variables, dtype=bool)
    binary[:count] = True
    return MixedIntegerProgram(
        cost=cost / unit,
        binary=binary,
        lower=np.concatenate(builder.lower),
        upper=np.concatenate(builder.upper),
        row=row[order],
        column=column[order],
        value=value[order],
        first=first,
        families=tuple(builder.families),
        unit=unit,
        memory_unit=builder.memory_unit,
    )
