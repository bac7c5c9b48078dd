"""Good assignments without a solver: coordinate descent (iterated conditional modes) that honours the memory
limit.

``price`` is a Lagrange multiplier: seconds per byte. With a high one the descent finds small assignments,
with none cheap ones; between them :func:`repair` looks for the cheapest assignment that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .problem import Floats, Group, Ints, Problem, Transfer, evaluate, host_of, is_within, sides_of

# What is gained must be more than this part of what is compared: less is rounding, which could as well replace a plan
# by one that sends more and hides it.
# Chosen: some thousand roundings of float64 (2.2e-16).
ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """A problem with the transfers at every group at hand."""

    problem: Problem
    produced: tuple[tuple[Transfer, ...], ...]
    consumed: tuple[tuple[Transfer, ...], ...]

    @staticmethod
    def of(problem: Problem) -> Neighbourhood:
        produced: list[list[Transfer]] = [[] for _ in problem.groups]
        consumed: list[list[Transfer]] = [[] for _ in problem.groups]
        for transfer in problem.transfers:
            produced[transfer.producer].append(transfer)
            for group in dict.fromkeys(transfer.consumers):
                if group != transfer.producer:
                    consumed[group].append(transfer)
        return Neighbourhood(problem, tuple(map(tuple, produced)), tuple(map(tuple, consumed)))

    def costs(self, choices: Ints, index: int) -> Floats:
        """[K] what group ``index`` and the transfers at it cost for each of its choices, the others as they
        are; windows are not looked at (:class:`_Beside` does)."""
        total = self.problem.groups[index].cost.copy()
        for _, seconds in self.moves(choices, index):
            total += seconds
        return total

    def moves(self, choices: Ints, index: int) -> Iterator[tuple[Transfer, Floats]]:
        """The transfers at group ``index``, and what each costs for each of its choices, [K]."""
        for transfer in self.produced[index]:
            yield transfer, self._producing(transfer, choices, index)
        for transfer in self.consumed[index]:
            yield transfer, _consuming(transfer, choices, index)

    def _producing(self, transfer: Transfer, choices: Ints, index: int) -> Floats:
        if index not in transfer.consumers:
            columns = {int(t[choices[c]]) for c, t in zip(transfer.consumers, transfer.targets, strict=True)}
            found: Floats = transfer.cost[:, sorted(columns)].sum(axis=1)[transfer.source]
            return found
        total = np.empty(len(transfer.source))
        for k, row in enumerate(transfer.source):
            pairs = zip(transfer.consumers, transfer.targets, strict=True)
            total[k] = transfer.cost[row, sorted({int(t[k if c == index else choices[c]]) for c, t in pairs})].sum()
        return total


def _consuming(transfer: Transfer, choices: Ints, index: int) -> Floats:
    cost = transfer.cost[transfer.source[choices[transfer.producer]]]
    pairs = list(zip(transfer.consumers, transfer.targets, strict=True))
    mine = [t for c, t in pairs if c == index]
    paid = {int(t[choices[c]]) for c, t in pairs if c != index}
    if paid:
        # Columns others need anyway are paid; a forbidden one stays forbidden.
        columns = [q for q in sorted(paid) if np.isfinite(cost[q])]
        cost = cost.copy()
        cost[columns] = 0.0
    if len(mine) == 1:
        found: Floats = cost[mine[0]]
        return found
    return np.array([cost[np.unique(columns)].sum() for columns in np.stack(mine, axis=1)])


@dataclass
class _Host:
    """The host's memory while a descent goes from choice to choice."""

    limit: float
    used: float

    @staticmethod
    def of(problem: Problem, choices: Ints) -> _Host:
        return _Host(problem.host_limit, host_of(problem, choices) if np.isfinite(problem.host_limit) else 0.0)

    def allow(self, group: Group, now: int, costs: Floats) -> Floats:
        """``costs`` of the choices of ``group``, which has chosen ``now``, infinite where they lead beyond the limit,
        or further beyond it."""
        if np.isinf(self.limit):
            return costs
        return np.where(self.used - group.host[now] + group.host <= max(self.limit, self.used), costs, np.inf)

    def move(self, group: Group, old: int, new: int) -> None:
        self.used += float(group.host[new] - group.host[old])


@dataclass
class _Beside:
    """What is at once in the windows while a descent goes from choice to choice: ``sides`` [windows, 2] are seconds of
    messages and of computing, ``change`` [windows, 2, K] those of the group looked at last."""

    near: Neighbourhood
    parts: dict[int, list[tuple[int, float]]]
    sides: Floats
    change: Floats = field(default_factory=lambda: np.zeros((0, 2, 0)))

    @staticmethod
    def of(near: Neighbourhood, choices: Ints) -> _Beside:
        problem = near.problem
        parts: dict[int, list[tuple[int, float]]] = {}
        for w, window in enumerate(problem.windows):
            for t, part in window.transfers.items():
                parts.setdefault(id(problem.transfers[t]), []).append((w, part))
        return _Beside(near, parts, np.array([sides_of(problem, window, choices) for window in problem.windows]))

    def costs(self, choices: Ints, index: int) -> Floats:
        """:meth:`Neighbourhood.costs`, without what hides."""
        problem = self.near.problem
        if not problem.windows:
            return self.near.costs(choices, index)
        own = problem.groups[index].cost
        total, sides = own.copy(), np.zeros((len(problem.windows), 2, len(own)))
        for transfer, seconds in self.near.moves(choices, index):
            total += seconds
            for w, part in self.parts.get(id(transfer), ()):
                sides[w, 0] += part * seconds
        for w, window in enumerate(problem.windows):
            sides[w, 1] += window.groups.get(index, 0.0) * np.where(np.isfinite(own), own, 0.0)
        sides[:, :, ~np.isfinite(total)] = 0.0
        self.change = sides - sides[:, :, choices[index], None]
        hidden = np.array([window.hidden for window in problem.windows])
        least: Floats = (self.sides[:, :, None] + self.change).min(axis=1)
        return total - hidden @ least

    def best(self, total: Floats, now: int) -> int:
        """The choice of least ``total``, or ``now`` where it gains no more than rounding: also of what was subtracted
        because it hides."""
        best = int(np.argmin(total))
        hidden = float(self.sides.min(axis=1).sum()) if len(self.sides) else 0.0
        return best if total[best] + ROUNDING * (abs(total[best]) + hidden) < total[now] else now

    def move(self, new: int) -> None:
        """The group looked at last takes choice ``new``."""
        if len(self.sides):
            self.sides = self.sides + self.change[:, :, new]


# Sweeps and rounds of this module's searches: chosen; most end earlier, because nothing changes any more.
def descend(near: Neighbourhood, choices: Ints, price: float = 0.0, cap: float = np.inf, sweeps: int = 12) -> Ints:
    """Coordinate descent on cost + ``price`` * memory over choices with ``temporary`` <= ``cap``; of the
    limits only that of the host is looked at: no move leads beyond it."""
    groups = near.problem.groups
    own = [np.where(g.temporary <= cap, price * g.memory, np.inf) for g in groups]
    found = choices.copy()
    host, beside = _Host.of(near.problem, found), _Beside.of(near, found)
    for _ in range(sweeps):
        changed = False
        for index, group in enumerate(groups):
            total = host.allow(group, int(found[index]), beside.costs(found, index) + own[index])
            best = beside.best(total, int(found[index]))
            if best != found[index]:
                host.move(group, int(found[index]), best)
                beside.move(best)
                found[index] = best
                changed = True
        if not changed:
            break
    return found


def polish(near: Neighbourhood, choices: Ints, sweeps: int = 12) -> Ints:
    """Coordinate descent on cost among assignments within the limits; ``choices`` must be one."""
    problem = near.problem
    if np.isinf(problem.memory_limit):
        return descend(near, choices, sweeps=sweeps)
    found = choices.copy()
    used = problem.memory_fixed + sum(float(g.memory[k]) for g, k in zip(problem.groups, found, strict=True))
    temporary = np.array([g.temporary[k] for g, k in zip(problem.groups, found, strict=True)])
    host, beside = _Host.of(problem, found), _Beside.of(near, found)
    for _ in range(sweeps):
        changed = False
        for index, group in enumerate(problem.groups):
            others = max(0.0, float(np.delete(temporary, index).max(initial=0.0)))
            peak = used - group.memory[found[index]] + group.memory + np.maximum(group.temporary, others)
            total = np.where(peak <= problem.memory_limit, beside.costs(found, index), np.inf)
            total = host.allow(group, int(found[index]), total)
            best = beside.best(total, int(found[index]))
            if best != found[index]:
                used += float(group.memory[best] - group.memory[found[index]])
                host.move(group, int(found[index]), best)
                beside.move(best)
                found[index], temporary[index] = best, group.temporary[best]
                changed = True
        if not changed:
            break
    return found


def smallest(problem: Problem) -> Ints:
    """Choices of least peak memory, transfers not looked at: for every cap on the temporary the sum is
    separable."""
    caps = np.unique(np.concatenate([np.maximum(g.temporary, 0.0) for g in problem.groups]))
    floor = max(float(g.temporary.min()) for g in problem.groups)
    peaks = np.zeros(len(caps))
    for group in problem.groups:
        order = np.argsort(group.temporary, kind="stable")
        least = np.minimum.accumulate(group.memory[order])
        position = np.searchsorted(group.temporary[order], caps, side="right") - 1
        peaks += np.where(position >= 0, least[np.maximum(position, 0)], np.inf)
    peaks[caps < floor] = np.inf
    cap = float(caps[np.argmin(peaks + caps)])
    return np.array([np.argmin(np.where(g.temporary <= cap, g.memory, np.inf)) for g in problem.groups], dtype=np.int64)


def fits(problem: Problem, choices: Ints) -> bool:
    """Within the limits and of finite cost."""
    return is_within(problem, choices) and bool(np.isfinite(evaluate(problem, choices)))


def unloaded(near: Neighbourhood, choices: Ints) -> Ints:
    """``choices`` with as much taken out of the host's memory as it has no room for, what costs least by the byte
    first."""
    problem, found = near.problem, choices.copy()
    host = _Host.of(problem, found)
    if host.used <= host.limit:
        return found
    ways = []
    for index, group in enumerate(problem.groups):
        now = int(choices[index])
        saved = group.host[now] - group.host
        costs = near.costs(choices, index)
        paid = float(costs[now]) if np.isfinite(costs[now]) else 0.0
        costs = np.where(saved > 0, costs, np.inf)
        best = int(np.argmin(costs))
        if np.isfinite(costs[best]):
            ways.append(((float(costs[best]) - paid) / float(saved[best]), index, best))
    for _, index, best in sorted(ways):
        if host.used > host.limit:
            host.move(problem.groups[index], int(found[index]), best)
            found[index] = best
    return found


def repair(near: Neighbourhood, choices: Ints, rounds: int = 10) -> Ints | None:
    """An assignment near ``choices`` that fits: bisects the price of memory, from ``choices`` down; None if
    none was found."""
    problem = near.problem
    if fits(problem, choices):
        return polish(near, choices)
    choices = unloaded(near, choices)
    if np.isinf(problem.memory_limit):
        moved = descend(near, choices)
        return moved if fits(problem, moved) else None
    memory = max(float(np.ptp(g.memory)) for g in problem.groups)
    cost = evaluate(problem, choices)
    # At this price one byte is worth more than any difference in cost.
    spread = sum(float(np.ptp(g.cost[np.isfinite(g.cost)])) for g in problem.groups)
    high = 1e3 * (spread + (cost if np.isfinite(cost) else 0.0)) / max(memory, 1.0)
    low, best = high * 1e-9, None
    for _ in range(rounds):
        price = float(np.sqrt(low * high))
        found = _fitting(near, choices, price)
        if found is None:
            low = price
            continue
        high = price
        if best is None or evaluate(problem, found) < evaluate(problem, best):
            best = found
    return best


def _fitting(near: Neighbourhood, choices: Ints, price: float) -> Ints | None:
    """The descent at one price, polished if it fits, tried for a few caps on the temporary."""
    problem = near.problem
    used = [g.temporary[k] for g, k in zip(problem.groups, choices, strict=True)]
    floor = max(float(g.temporary.min()) for g in problem.groups)
    spread = max(float(max(used)), floor) - floor
    # Chosen: as it is, much less, and the least.
    for share in (1.0, 0.25, 0.0):
        moved = descend(near, choices, price, cap=floor + share * spread)
        if fits(problem, moved):
            return polish(near, moved)
    return None
