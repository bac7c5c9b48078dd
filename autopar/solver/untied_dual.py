"""Bounds of a problem whose groups stand for copies that choose alike, for assignments in which every copy chooses by
itself.

Groups stand for copies, and costs and bytes are sums over these. Copies of a group that are at the ends of the same
transfers are a *kind*: the first of equal layers reads other values than the rest. The problem in which every copy is a
group has the dual of :mod:`.message_passing`, with messages for each copy of a slot. Let these be equal for all copies
of one slot. So there are one u[p] and one v[q] for each slot again, summed over copies, of which a kind has the
``weight`` that its copies are of all at that end of the slot:

    theta_kind[k] = weight (cost_i[k] + mu memory_i[k]) + sum weight u[source[k]] + sum weight v[target[k]]
    bound         = sum over kinds of min_k theta_kind[k]  -  mu (memory_limit - memory_fixed)

This is a bound for all u and v with u[p] + v[q] <= s[p, q], and all mu >= 0, and takes about as many arrays as the
problem has, however many copies there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .budget import Budget, sweep_seconds
from .message_passing import Messages, Slot
from .problem import Floats, Ints, Problem, evaluate, memory_of
from .reduce import FewerChoices, keep_choices

# The consumer of a transfer, by both their positions, and an end of this slot: whether it is that of the producer.
SlotKey = tuple[int, int]
End = tuple[int, int, bool]
# Sweeps between two looks at the bound, how often it is looked at before the price of memory is, the least share of it
# by which it must rise, the share by which two prices differ that are taken as equal, and how many times another one is
# that is tried beyond all others. Chosen: less is not worth a sweep.
BATCH, LOOKS, LEAST_RISE, SAME_PRICE, FARTHER = 10, 4, 5e-4, 0.02, 3.0


@dataclass(frozen=True)
class Kind:
    """Copies of a group that are at the ends of the same slots: the ``weight`` that they are of all copies of
    ``group``, and of all at each of the ``ends``."""

    group: int
    weight: float
    ends: Mapping[End, float]


@dataclass(frozen=True)
class Copies:
    """The ``kinds`` of the groups of a problem, in the order of groups, how often each of its transfers occurs, and the
    ``loose`` slots, whose copies have different numbers of consumers. These have no messages."""

    kinds: tuple[Kind, ...]
    times: tuple[int, ...]
    loose: frozenset[SlotKey] = frozenset()


# A slot, whether an end is that of its producer, and the kinds there, by position, with their weights.
_End = tuple[Slot, bool, list[tuple[int, float]]]
# The kinds of a group, the ends that it gathers at and those that it passes on, and by how much it divides that.
_GroupVisit = tuple[list[_End], list[_End], int]


@dataclass(eq=False)
class UntiedMessages(Messages):
    """The state of the ascent. ``theta`` is that of kinds."""

    copies: Copies = field(default_factory=lambda: Copies((), ()))

    def refresh(self) -> None:
        groups = self.problem.groups
        charged = [group.cost + self.price * group.memory for group in groups]
        self.theta = [kind.weight * charged[kind.group] for kind in self.copies.kinds]
        for slot, ends in zip(self.slots, self._ends, strict=True):
            slot.is_pulled = [False, False]
            if ends is None:
                continue
            slot.u = np.minimum(slot.u, (slot.share - slot.v).min(axis=1))
            for of_producer, kinds in ((True, ends[0]), (False, ends[1])):
                self._add(slot, of_producer, kinds, slot.u if of_producer else slot.v)

    def set_price(self, price: float) -> None:
        """Sets the price of memory, in seconds per byte."""
        self.price = price
        self.refresh()

    def sweep(self, count: int) -> None:
        """Makes ``count`` rounds, forwards and backwards in turn. The last splits its gain evenly, but for slots of
        groups of several kinds."""
        for _ in range(count - 1):
            for gathered, onward, divisor in self._rounds[self.sweeps % 2]:
                self._visit(gathered, onward, divisor)
            self._pool()
        theta = self._of_single_kinds
        for slot in self._between_single_kinds if self.sweeps % 2 == 0 else reversed(self._between_single_kinds):
            slot.update(theta)
        self._pool()
        self.refresh()

    def decode(self) -> Ints:
        """The choice of each group, if all its copies choose alike."""
        groups = [np.zeros(0)] * len(self.problem.groups)
        for kind, theta in zip(self.copies.kinds, self.theta, strict=True):
            groups[kind.group] = theta if len(groups[kind.group]) == 0 else groups[kind.group] + theta
        return self._decoded(groups)

    def _add(self, slot: Slot, of_producer: bool, kinds: list[tuple[int, float]], amount: Floats) -> None:
        added = amount[slot.source if of_producer else slot.target]
        for kind, weight in kinds:
            self.theta[kind] += added if weight == 1.0 else weight * added

    def _visit(self, gathered: list[_End], onward: list[_End], divisor: int) -> None:
        """The copies of a group gather the unused price of their slots, and pass on how much their choices cost above
        the cheapest: of a slot with several kinds, what all of them have."""
        for slot, of_producer, kinds in gathered:
            if not slot.is_pulled[of_producer]:
                slot.is_pulled = [not of_producer, of_producer]
                if of_producer:
                    most = np.minimum.reduce(slot.share - slot.v, axis=1)
                    self._add(slot, True, kinds, most - slot.u)
                    slot.u = most
                else:
                    most = np.minimum.reduce(slot.share - slot.u[:, None], axis=0)
                    self._add(slot, False, kinds, most - slot.v)
                    slot.v = most
        above: dict[int, Floats] = {}
        for _, _, kinds in onward:
            for kind, _ in kinds:
                if kind not in above:
                    theta = self.theta[kind]
                    above[kind] = (theta - np.minimum.reduce(theta)) / divisor
        for slot, of_producer, kinds in onward:
            order, starts = (
                (slot.row_order, slot.row_starts) if of_producer else (slot.column_order, slot.column_starts)
            )
            amount: Floats | None = None
            for kind, weight in kinds:
                least = np.minimum.reduceat(above[kind][order], starts) / weight
                amount = least if amount is None else np.minimum(amount, least)
            assert amount is not None
            slot.is_pulled = [False, False]
            self._add(slot, of_producer, kinds, -amount)
            if of_producer:
                slot.u = slot.u - amount
            else:
                slot.v = slot.v - amount

    @cached_property
    def _single(self) -> Mapping[int, int]:
        """The kinds of the groups that have one."""
        counts = Counter(kind.group for kind in self.copies.kinds)
        return {kind.group: i for i, kind in enumerate(self.copies.kinds) if counts[kind.group] == 1}

    @property
    def _of_single_kinds(self) -> list[Floats]:
        """Theta by group, of those that have one kind."""
        theta = [np.zeros(0)] * len(self.problem.groups)
        for group, kind in self._single.items():
            theta[group] = self.theta[kind]
        return theta

    @cached_property
    def _between_single_kinds(self) -> list[Slot]:
        pairs = zip(self.slots, self._ends, strict=True)
        return [s for s, ends in pairs if ends is not None and {s.producer, s.consumer} <= self._single.keys()]

    @cached_property
    def _ends(self) -> list[tuple[list[tuple[int, float]], list[tuple[int, float]]] | None]:
        """For each slot, the kinds at the ends of producer and consumer; None for a loose one."""
        found: dict[End, list[tuple[int, float]]] = {}
        for position, kind in enumerate(self.copies.kinds):
            for end, weight in kind.ends.items():
                found.setdefault(end, []).append((position, weight))
        keys = [(t, c) for t, transfer in enumerate(self.problem.transfers) for c in range(len(transfer.consumers))]
        loose = self.copies.loose
        return [None if key in loose else (found[*key, True], found[*key, False]) for key in keys]

    @cached_property
    def _rounds(self) -> tuple[list[_GroupVisit], list[_GroupVisit]]:
        """The visits of a round forwards and of one backwards."""
        count = len(self.problem.groups)
        before: list[list[_End]] = [[] for _ in range(count)]
        behind: list[list[_End]] = [[] for _ in range(count)]
        own: list[list[_End]] = [[] for _ in range(count)]
        shared = {id(slot) for each in self.shared for slot in each.slots}
        for slot, ends in zip(self.slots, self._ends, strict=True):
            if ends is None:
                continue
            first, second = (slot, True, ends[0]), (slot, False, ends[1])
            if 1 in slot.share.shape and id(slot) not in shared:  # All of its price is given to one end, once.
                end = first if slot.share.shape[1] == 1 else second
                before[slot.producer if end[1] else slot.consumer].append(end)
                continue
            if slot.producer == slot.consumer:
                own[slot.producer] += [first, second]
                continue
            at = ((slot.producer, first), (slot.consumer, second))
            (low, end_low), (high, end_high) = sorted(at, key=lambda end: end[0])
            behind[low].append(end_low)
            before[high].append(end_high)
        return (
            [_visit_of(before[i], behind[i], own[i], True) for i in range(count)],
            [_visit_of(behind[i], before[i], own[i], False) for i in reversed(range(count))],
        )


def _visit_of(before: list[_End], behind: list[_End], own: list[_End], of_producer: bool) -> _GroupVisit:
    """A visit that passes on to those ``behind``. Of slots from a group to itself one end passes on."""
    onward = [*behind, *(end for end in own if end[1] == of_producer)]
    return [*before, *behind, *own], onward, max(len(before) + len(own), len(onward), 1)


def untied_bound(
    problem: Problem,
    copies: Copies,
    *,
    enough: float,
    budget: Budget,
    known: Sequence[Ints] = (),
    first_price: float = 0.0,
) -> float:
    """What no assignment within the limit of the device's memory costs less than in which every copy chooses by itself
    or, if that is more, ``enough``. ``problem`` has no windows and no temporary bytes; host memory is not limited.
    ``known``: assignments in which copies choose alike; ``first_price``: where the search for the price of memory
    begins, in seconds per byte, 0 if nothing is known.

    Every assignment costs, at a price of memory, what is linear in it: the next price is where the cheapest that is
    known costs most (cutting planes: Kelley 1960). Those that are known choose alike, so the prices on both sides are
    tried last."""
    if not all(np.isfinite(group.cost).any() for group in problem.groups):
        return enough
    allowed, kept = _allowed(problem, copies, enough)
    messages = UntiedMessages(allowed, copies=copies)
    sweep = sweep_seconds(len(messages.slots), sum(slot.share.size for slot in messages.slots))
    restricted = (kept.restrict(choices) for choices in known)
    lines = [_line(allowed, choices) for choices in restricted if choices is not None]
    best, most, price = messages.bound, np.inf, first_price
    found: dict[float, float] = {}
    while budget.left > 0 and best < enough and most - best > LEAST_RISE * abs(best):
        last, before = best, price
        found[price] = _climb(messages, price, enough, budget, sweep)
        best = max(best, found[price])
        lines.append(_line(allowed, messages.decode()))
        price, most = _highest(lines, enough)
        if abs(price - before) <= SAME_PRICE * before and best - last <= LEAST_RISE * abs(best):
            break
    while budget.left > 0 and best < enough:
        beside = _beside(found)
        if not beside:
            break
        for price in beside:
            found[price] = _climb(messages, price, enough, budget, sweep)
            best = max(best, found[price])
    return min(best, enough)


def _beside(found: Mapping[float, float]) -> list[float]:
    """The prices to try on both sides of that of the highest bound, none where those that are known are near. The bound
    is concave in the price."""
    prices = sorted(found)
    at = prices.index(max(prices, key=lambda price: found[price]))
    low, best = prices[at - 1] if at else 0.0, prices[at]
    high = prices[at + 1] if at + 1 < len(prices) else FARTHER**2 * best
    between = [(low * best) ** 0.5 if low else best / FARTHER, (best * high) ** 0.5 if best else high / FARTHER]
    known = (0.0, *prices)
    return [own for own in between if all(abs(own - price) > SAME_PRICE * own for price in known)]


def _climb(messages: UntiedMessages, price: float, enough: float, budget: Budget, sweep: float) -> float:
    """Sweeps at a price of memory, each of so many counted seconds, while the bound rises, but for :data:`LOOKS` at
    most: another price may be better. Returns the bound."""
    messages.set_price(price)
    for _ in range(LOOKS):
        last = messages.bound
        messages.sweep(BATCH)
        budget.spend(BATCH * sweep)
        if budget.left <= 0 or messages.bound >= enough or messages.bound - last <= LEAST_RISE * abs(messages.bound):
            break
    return messages.bound


def _line(problem: Problem, choices: Ints) -> tuple[float, float]:
    """The cost of an assignment, and its bytes above the limit: what it costs more for each second per byte."""
    return evaluate(problem, choices), memory_of(problem, choices) - problem.memory_limit


def _highest(lines: Sequence[tuple[float, float]], enough: float) -> tuple[float, float]:
    """The price of at least 0 at which the lowest of ``lines`` is highest, and how high it is there: where none falls,
    that at which one is ``enough``."""
    lines = lines if any(slope <= 0.0 for _, slope in lines) else [*lines, (enough, 0.0)]
    prices = {0.0} | {
        (cost - other) / (more - less) for cost, less in lines for other, more in lines if more > less and cost > other
    }
    best = max(prices, key=lambda price: min(cost + price * slope for cost, slope in lines))
    return best, min(cost + best * slope for cost, slope in lines)


def _allowed(problem: Problem, copies: Copies, enough: float) -> tuple[Problem, FewerChoices]:
    """The problem without choices that cost infinitely much, and the inverse. A transfer that does costs ``enough`` for
    each copy: no assignment of use has one."""
    masks = [np.isfinite(group.cost) for group in problem.groups]
    few, inverse = keep_choices(problem, masks), FewerChoices.of(masks)
    transfers = tuple(
        transfer
        if np.isfinite(transfer.cost).all()
        else replace(transfer, cost=np.where(np.isfinite(transfer.cost), transfer.cost, times * max(enough, 0.0)))
        for transfer, times in zip(few.transfers, copies.times, strict=True)
    )
    return replace(few, transfers=transfers), inverse
