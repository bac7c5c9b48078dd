"""Good assignments without a solver: coordinate descent (iterated conditional modes) within the memory limit.

``price`` is a Lagrange multiplier in seconds per byte. With a high price the descent finds small assignments, at price
0 cheap ones. Between them, :func:`repair` searches for the cheapest assignment that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .problem import Floats, Group, Ints, Problem, Transfer, evaluate, host_of, is_within, sides_of

# A move must gain more than this share of the compared costs. Smaller gains are rounding, which could replace a plan by
# one that sends more, but hides it.
# Chosen: some thousand roundings of float64 (2.2e-16).
ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """A problem, and for each group the transfers that it produces and consumes."""

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
        """The cost of group ``index`` and its transfers for each of its choices, [K], while the other groups keep
        theirs. Windows are ignored here; :class:`_Overlap` takes them into account."""
        total = self.problem.groups[index].cost.copy()
        for _, seconds in self.moves(choices, index):
            total += seconds
        return total

    def moves(self, choices: Ints, index: int) -> Iterator[tuple[Transfer, Floats]]:
        """The transfers of group ``index``, each with its cost for each choice of the group, [K]."""
        for transfer in self.produced[index]:
            yield transfer, self._producing(transfer, choices, index)
        for transfer in self.consumed[index]:
            yield transfer, _consuming(transfer, choices, index)

    def _producing(self, transfer: Transfer, choices: Ints, index: int) -> Floats:
        if index not in transfer.consumers:
            columns = {int(t[choices[c]]) for c, t in zip(transfer.consumers, transfer.targets, strict=True)}
            seconds: Floats = transfer.cost[:, sorted(columns)].sum(axis=1)[transfer.source]
            return seconds
        total = np.empty(len(transfer.source))
        for k, row in enumerate(transfer.source):
            pairs = zip(transfer.consumers, transfer.targets, strict=True)
            total[k] = transfer.cost[row, sorted({int(t[k if c == index else choices[c]]) for c, t in pairs})].sum()
        return total


def _consuming(transfer: Transfer, choices: Ints, index: int) -> Floats:
    cost = transfer.cost[transfer.source[choices[transfer.producer]]]
    pairs = list(zip(transfer.consumers, transfer.targets, strict=True))
    own = [t for c, t in pairs if c == index]
    paid = {int(t[choices[c]]) for c, t in pairs if c != index}
    if paid:
        # Columns that other consumers need are already paid; forbidden entries stay forbidden.
        columns = [q for q in sorted(paid) if np.isfinite(cost[q])]
        cost = cost.copy()
        cost[columns] = 0.0
    if len(own) == 1:
        seconds: Floats = cost[own[0]]
        return seconds
    return np.array([cost[np.unique(columns)].sum() for columns in np.stack(own, axis=1)])


@dataclass
class _HostMemory:
    """The use of host memory, updated during a descent."""

    limit: float
    used: float

    @staticmethod
    def of(problem: Problem, choices: Ints) -> _HostMemory:
        return _HostMemory(problem.host_limit, host_of(problem, choices) if np.isfinite(problem.host_limit) else 0.0)

    def allow(self, group: Group, now: int, costs: Floats) -> Floats:
        """``costs`` of the choices of ``group``, whose current choice is ``now``, but infinite for choices that would
        exceed the limit, or exceed it further."""
        if np.isinf(self.limit):
            return costs
        return np.where(self.used - group.host[now] + group.host <= max(self.limit, self.used), costs, np.inf)

    def move(self, group: Group, old: int, new: int) -> None:
        self.used += float(group.host[new] - group.host[old])


@dataclass
class _Overlap:
    """The overlap in the windows, updated during a descent. ``sides`` [windows, 2]: seconds of messages and of
    computation; ``change`` [windows, 2, K]: how each choice of the group evaluated last would change them."""

    neighbourhood: Neighbourhood
    parts: dict[int, list[tuple[int, float]]]
    sides: Floats
    change: Floats = field(default_factory=lambda: np.zeros((0, 2, 0)))

    @staticmethod
    def of(neighbourhood: Neighbourhood, choices: Ints) -> _Overlap:
        problem = neighbourhood.problem
        parts: dict[int, list[tuple[int, float]]] = {}
        for w, window in enumerate(problem.windows):
            for t, part in window.transfers.items():
                parts.setdefault(id(problem.transfers[t]), []).append((w, part))
        sides = np.array([sides_of(problem, window, choices) for window in problem.windows])
        return _Overlap(neighbourhood, parts, sides)

    def costs(self, choices: Ints, index: int) -> Floats:
        """:meth:`Neighbourhood.costs` without the seconds that are hidden."""
        problem = self.neighbourhood.problem
        if not problem.windows:
            return self.neighbourhood.costs(choices, index)
        own = problem.groups[index].cost
        total, sides = own.copy(), np.zeros((len(problem.windows), 2, len(own)))
        for transfer, seconds in self.neighbourhood.moves(choices, index):
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
        """The choice of least ``total``, or ``now`` if the gain is within rounding of the costs or of the hidden
        seconds subtracted from them."""
        best = int(np.argmin(total))
        hidden = float(self.sides.min(axis=1).sum()) if len(self.sides) else 0.0
        return best if total[best] + ROUNDING * (abs(total[best]) + hidden) < total[now] else now

    def move(self, new: int) -> None:
        """Sets the group evaluated last to choice ``new``."""
        if len(self.sides):
            self.sides = self.sides + self.change[:, :, new]


# Sweeps and rounds of this module's searches: chosen; most end earlier, because nothing changes any more.
def descend(
    neighbourhood: Neighbourhood, choices: Ints, price: float = 0.0, cap: float = np.inf, sweeps: int = 12
) -> Ints:
    """Coordinate descent on cost + ``price`` * memory over choices with ``temporary`` <= ``cap``. It ignores the limit
    of device memory, but no move exceeds that of host memory."""
    groups = neighbourhood.problem.groups
    memory_costs = [np.where(g.temporary <= cap, price * g.memory, np.inf) for g in groups]
    current = choices.copy()
    host, overlap = _HostMemory.of(neighbourhood.problem, current), _Overlap.of(neighbourhood, current)
    for _ in range(sweeps):
        changed = False
        for index, group in enumerate(groups):
            total = host.allow(group, int(current[index]), overlap.costs(current, index) + memory_costs[index])
            best = overlap.best(total, int(current[index]))
            if best != current[index]:
                host.move(group, int(current[index]), best)
                overlap.move(best)
                current[index] = best
                changed = True
        if not changed:
            break
    return current


def polish(neighbourhood: Neighbourhood, choices: Ints, sweeps: int = 12) -> Ints:
    """Coordinate descent on cost among assignments within the limits. ``choices`` must be within them."""
    problem = neighbourhood.problem
    if np.isinf(problem.memory_limit):
        return descend(neighbourhood, choices, sweeps=sweeps)
    current = choices.copy()
    used = problem.memory_fixed + sum(float(g.memory[k]) for g, k in zip(problem.groups, current, strict=True))
    temporary = np.array([g.temporary[k] for g, k in zip(problem.groups, current, strict=True)])
    host, overlap = _HostMemory.of(problem, current), _Overlap.of(neighbourhood, current)
    for _ in range(sweeps):
        changed = False
        for index, group in enumerate(problem.groups):
            largest_other = max(0.0, float(np.delete(temporary, index).max(initial=0.0)))
            peak = used - group.memory[current[index]] + group.memory + np.maximum(group.temporary, largest_other)
            total = np.where(peak <= problem.memory_limit, overlap.costs(current, index), np.inf)
            total = host.allow(group, int(current[index]), total)
            best = overlap.best(total, int(current[index]))
            if best != current[index]:
                used += float(group.memory[best] - group.memory[current[index]])
                host.move(group, int(current[index]), best)
                overlap.move(best)
                current[index], temporary[index] = best, group.temporary[best]
                changed = True
        if not changed:
            break
    return current


def smallest_sums(problem: Problem) -> tuple[Floats, Floats]:
    """Caps on the temporary, ascending, and for each the least sum of the memory of all groups, ignoring transfers;
    infinite if a group has nothing within the cap."""
    caps = np.unique(np.concatenate([np.maximum(g.temporary, 0.0) for g in problem.groups]))
    sums = np.zeros(len(caps))
    for group in problem.groups:
        order = np.argsort(group.temporary, kind="stable")
        least = np.minimum.accumulate(group.memory[order])
        position = np.searchsorted(group.temporary[order], caps, side="right") - 1
        sums += np.where(position >= 0, least[np.maximum(position, 0)], np.inf)
    return caps, sums


def smallest(problem: Problem) -> Ints:
    """Choices of least peak memory, ignoring transfers. For every cap on the temporary, the sum is separable."""
    caps, sums = smallest_sums(problem)
    cap = float(caps[np.argmin(sums + caps)])
    return np.array([np.argmin(np.where(g.temporary <= cap, g.memory, np.inf)) for g in problem.groups], dtype=np.int64)


def fits(problem: Problem, choices: Ints) -> bool:
    """Whether an assignment is within the limits and of finite cost."""
    return is_within(problem, choices) and bool(np.isfinite(evaluate(problem, choices)))


def unloaded(neighbourhood: Neighbourhood, choices: Ints) -> Ints:
    """``choices`` with as much moved out of host memory as exceeds its limit. Moves that cost least per byte come
    first.
    """
    problem, current = neighbourhood.problem, choices.copy()
    host = _HostMemory.of(problem, current)
    if host.used <= host.limit:
        return current
    moves = []
    for index, group in enumerate(problem.groups):
        now = int(choices[index])
        saved = group.host[now] - group.host
        costs = neighbourhood.costs(choices, index)
        paid = float(costs[now]) if np.isfinite(costs[now]) else 0.0
        costs = np.where(saved > 0, costs, np.inf)
        best = int(np.argmin(costs))
        if np.isfinite(costs[best]):
            moves.append(((float(costs[best]) - paid) / float(saved[best]), index, best))
    for _, index, best in sorted(moves):
        if host.used > host.limit:
            host.move(problem.groups[index], int(current[index]), best)
            current[index] = best
    return current


def repair(neighbourhood: Neighbourhood, choices: Ints, rounds: int = 10) -> Ints | None:
    """An assignment near ``choices`` that fits. Bisects the price of memory and descends from ``choices`` at each
    price; None if no assignment was found."""
    problem = neighbourhood.problem
    if fits(problem, choices):
        return polish(neighbourhood, choices)
    choices = unloaded(neighbourhood, choices)
    if np.isinf(problem.memory_limit):
        moved = descend(neighbourhood, choices)
        return moved if fits(problem, moved) else None
    memory = max(float(np.ptp(g.memory)) for g in problem.groups)
    cost = evaluate(problem, choices)
    # At this price one byte is worth more than any difference in cost.
    spread = sum(float(np.ptp(g.cost[np.isfinite(g.cost)])) for g in problem.groups)
    high = 1e3 * (spread + (cost if np.isfinite(cost) else 0.0)) / max(memory, 1.0)
    low, best = high * 1e-9, None
    for _ in range(rounds):
        price = float(np.sqrt(low * high))
        fitting = _fitting(neighbourhood, choices, price)
        if fitting is None:
            low = price
            continue
        high = price
        if best is None or evaluate(problem, fitting) < evaluate(problem, best):
            best = fitting
    return best


def _fitting(neighbourhood: Neighbourhood, choices: Ints, price: float) -> Ints | None:
    """Descends at one price under a few caps on the temporary. Returns the first assignment that fits, polished."""
    problem = neighbourhood.problem
    used = [g.temporary[k] for g, k in zip(problem.groups, choices, strict=True)]
    floor = max(float(g.temporary.min()) for g in problem.groups)
    spread = max(float(max(used)), floor) - floor
    # Chosen: as it is, much less, and the least.
    for share in (1.0, 0.25, 0.0):
        moved = descend(neighbourhood, choices, price, cap=floor + share * spread)
        if fits(problem, moved):
            return polish(neighbourhood, moved)
    return None
