"""Exact reductions of a :class:`~autopar.solver.problem.Problem`: each gives a smaller problem with the same optimum.

Each reduction is a frozen dataclass with ``apply(problem) -> (smaller, inverse)``. The inverse maps choices back
(``expand``), maps choices forward (``restrict``) and states by how much the two objectives differ (``offset``). As in
cvxpy, a chain composes them: :func:`reduce` runs all of them until nothing changes.

========================== =================================================================================
:class:`BoundMemory`       limits that cannot bind disappear; constants move into ``memory_fixed``
:class:`DropForbidden`     choices of infinite cost, without a partner across a transfer, or too large
:class:`DropDominated`     choices that another choice replaces at no loss, whatever the neighbours do
:class:`SimplifyTransfers` free, fixed, repeated and independent consumers; equal rows and columns
:class:`EliminateGroups`   groups with at most two neighbours fold into them (min-plus product)
========================== =================================================================================

Dominance is the Goldstein criterion for pairwise problems (Goldstein 1994, "Efficient rotamer elimination"),
extended here to transfers that several consumers share; elimination is bucket elimination restricted to width
two (Dechter 1999).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from .eliminate_variables import Fold, eliminate
from .problem import Group, Ints, Problem, Transfer, without_needless_host
from .reduce_dominated import undominated
from .reduction_memo import FiniteMemo, ReductionMemo
from .simplify_edges import simplify

Mask = NDArray[np.bool_]


class Inverse(Protocol):
    """Maps choices between a problem and its reduction: objective(original) = objective(reduced) + ``offset``."""

    @property
    def offset(self) -> float: ...

    def expand(self, choices: Ints) -> Ints:
        """Choices of the original problem, given those of the reduced one. The objective differs by ``offset``."""

    def restrict(self, choices: Ints) -> Ints | None:
        """Choices of the reduced problem for those of the original one; None if one of them was dropped without a
        replacement."""


class Reduction(Protocol):
    """A transformation of problems that keeps the optimum."""

    name: ClassVar[str]

    def apply(self, problem: Problem) -> tuple[Problem, Inverse]: ...


@dataclass(frozen=True, eq=False)
class SameChoices:
    """Inverse of a reduction that leaves groups and their choices alone."""

    offset: float = 0.0

    def expand(self, choices: Ints) -> Ints:
        return choices

    def restrict(self, choices: Ints) -> Ints | None:
        return choices


@dataclass(frozen=True, eq=False)
class FewerChoices:
    """Inverse of dropping choices: ``kept[i]`` are the old choices that remain; ``image[i]`` maps an old choice to the
    new one that is or replaces it (-1: none)."""

    kept: tuple[Ints, ...]
    image: tuple[Ints, ...]
    offset: float = 0.0

    @staticmethod
    def of(masks: Sequence[Mask]) -> FewerChoices:
        """The inverse of keeping the masked choices alone."""
        kept = tuple(np.flatnonzero(mask) for mask in masks)
        return FewerChoices(kept, tuple(np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int64) for mask in masks))

    def expand(self, choices: Ints) -> Ints:
        return np.array([kept[k] for kept, k in zip(self.kept, choices, strict=True)], dtype=np.int64)

    def restrict(self, choices: Ints) -> Ints | None:
        mapped = np.array([image[k] for image, k in zip(self.image, choices, strict=True)], dtype=np.int64)
        return None if (mapped < 0).any() else mapped


@dataclass(frozen=True, eq=False)
class FewerGroups:
    """Inverse of eliminating groups: ``remaining`` are the old indices of the groups that remain; ``folds`` decide the
    others. They are in the order of elimination, and each needs the choices of groups eliminated later or not at
    all."""

    remaining: Ints
    folds: tuple[Fold, ...]
    size: int
    offset: float

    def expand(self, choices: Ints) -> Ints:
        full = np.zeros(self.size, dtype=np.int64)
        full[self.remaining] = choices
        for fold in reversed(self.folds):
            full[fold.group] = fold.best(full)
        return full

    def restrict(self, choices: Ints) -> Ints | None:
        return choices[self.remaining]


@dataclass(frozen=True, eq=False)
class Chain:
    """The inverses of successive reductions, in the order in which the reductions were applied."""

    links: tuple[Inverse, ...]

    @property
    def offset(self) -> float:
        return float(sum(link.offset for link in self.links))

    def expand(self, choices: Ints) -> Ints:
        for link in reversed(self.links):
            choices = link.expand(choices)
        return choices

    def restrict(self, choices: Ints) -> Ints | None:
        restricted: Ints | None = choices
        for link in self.links:
            restricted = None if restricted is None else link.restrict(restricted)
        return restricted


def keep_choices(problem: Problem, masks: Iterable[Mask]) -> Problem:
    """The problem with only the masked choices of each group."""
    # Arrays that lose nothing stay the same objects (see autopar.solver.reduction_memo).
    kept = [None if mask.all() else np.flatnonzero(mask) for mask in masks]
    groups = tuple(group if k is None else _fewer_of(group, k) for group, k in zip(problem.groups, kept, strict=True))
    transfers = tuple(_fewer_at(transfer, kept) for transfer in problem.transfers)
    return replace(problem, groups=groups, transfers=transfers)


def _fewer_of(group: Group, kept: Ints) -> Group:
    return Group(group.name, group.cost[kept], group.memory[kept], group.temporary[kept], group.host[kept])


def _fewer_at(transfer: Transfer, kept: list[Ints | None]) -> Transfer:
    """The transfer with the choices that its ends keep (None: all)."""
    if all(kept[end] is None for end in (transfer.producer, *transfer.consumers)):
        return transfer
    ends = [(transfer.producer, transfer.source), *zip(transfer.consumers, transfer.targets, strict=True)]
    source, *targets = (labels if (k := kept[end]) is None else labels[k] for end, labels in ends)
    return replace(transfer, source=source, targets=tuple(targets))


def _fewer(problem: Problem, masks: list[Mask], substitutes: list[Ints]) -> tuple[Problem, FewerChoices]:
    """The problem with only the masked choices, and the inverse. ``substitutes[i][k]``: the choice that represents k (k
    itself if kept)."""
    kept = tuple(np.flatnonzero(mask) for mask in masks)
    images = []
    for mask, substitute in zip(masks, substitutes, strict=True):
        position = np.where(mask, np.cumsum(mask) - 1, -1)
        images.append(position[substitute].astype(np.int64))
    return keep_choices(problem, masks), FewerChoices(kept, tuple(images))


@dataclass(frozen=True)
class BoundMemory:
    """Removes device or host memory from the problem if no assignment can exceed its limit. Moves the bytes that every
    choice of a group needs, and the temporary that some group always needs, into ``memory_fixed``. ``keeps``: whether
    the device's memory stays, since its limit is still to come."""

    name: ClassVar[str] = "bound-memory"
    keeps: bool = False

    def apply(self, problem: Problem) -> tuple[Problem, Inverse]:
        if not problem.groups or any(len(group.cost) == 0 for group in problem.groups):
            return problem, SameChoices()
        problem = without_needless_host(problem)
        groups = problem.groups
        most = sum(float(g.memory.max()) for g in groups) + max(0.0, max(float(g.temporary.max()) for g in groups))
        if not self.keeps and (np.isinf(problem.memory_limit) or problem.memory_fixed + most <= problem.memory_limit):
            bare = tuple(
                replace(g, memory=np.zeros_like(g.cost), temporary=np.zeros_like(g.cost))
                if g.memory.any() or g.temporary.any()
                else g
                for g in groups
            )
            return replace(problem, groups=bare, memory_limit=float("inf")), SameChoices()
        always = max(0.0, max(float(g.temporary.min()) for g in groups))
        least = [float(g.memory.min()) for g in groups]
        moved = tuple(
            replace(g, memory=g.memory - low, temporary=np.maximum(g.temporary - always, 0.0)) if low or always else g
            for g, low in zip(groups, least, strict=True)
        )
        return replace(problem, groups=moved, memory_fixed=problem.memory_fixed + sum(least) + always), SameChoices()


def _support(problem: Problem, masks: list[Mask], finite: FiniteMemo) -> None:
    """Clears the masks of choices that have no possible partner across some transfer, until all have one."""
    waiting = [transfer for transfer in problem.transfers if not finite.has(transfer.cost)]
    changed = set(range(len(masks)))
    while changed:
        before, changed = changed, set()
        for transfer in waiting:
            if not (before | changed).isdisjoint((transfer.producer, *transfer.consumers)):
                changed |= _supported(transfer, masks)


def _supported(transfer: Transfer, masks: list[Mask]) -> set[int]:
    """Clears the masks of choices that have no possible partner across ``transfer``. Returns the groups of those."""
    changed: set[int] = set()
    finite: Mask = np.asarray(np.isfinite(transfer.cost))
    for consumer, target in zip(transfer.consumers, transfer.targets, strict=True):
        rows = np.zeros(finite.shape[0], dtype=bool)
        columns = np.zeros(finite.shape[1], dtype=bool)
        rows[transfer.source[masks[transfer.producer]]] = True
        columns[target[masks[consumer]]] = True
        ends: tuple[tuple[int, Mask], ...] = (
            (transfer.producer, np.asarray(finite[:, columns].any(axis=1))[transfer.source]),
            (consumer, np.asarray(finite[rows].any(axis=0))[target]),
        )
        for group, supported in ends:
            if (masks[group] & ~supported).any():
                masks[group] = masks[group] & supported
                changed.add(group)
    return changed


@dataclass(frozen=True)
class DropForbidden:
    """Drops choices of infinite cost, choices without a finite partner, and choices that exceed the memory of the
    device or of the host even if every other group takes its smallest."""

    name: ClassVar[str] = "drop-forbidden"
    finite: FiniteMemo = field(default_factory=FiniteMemo, repr=False)

    def apply(self, problem: Problem) -> tuple[Problem, Inverse]:
        masks = [np.isfinite(group.cost) for group in problem.groups]
        _support(problem, masks, self.finite)
        if all(mask.any() for mask in masks) and problem.is_limited:
            _fit(problem, masks)
            _support(problem, masks, self.finite)
        if all(mask.all() for mask in masks):
            return problem, SameChoices()
        return _fewer(problem, masks, [np.arange(len(mask)) for mask in masks])


def _fit(problem: Problem, masks: list[Mask]) -> None:
    pairs = list(zip(problem.groups, masks, strict=True))
    least = np.array([g.memory[mask].min() for g, mask in pairs])
    always = max((float(g.temporary[mask].min()) for g, mask in pairs), default=0.0)
    always = max(always, 0.0)
    # Rounding of byte counts that are not integers must not drop choices that fit exactly.
    spare = problem.memory_limit * (1 + 1e-12) - problem.memory_fixed - float(least.sum())
    least_host = np.array([g.host[mask].min() for g, mask in pairs])
    spare_host = problem.host_limit * (1 + 1e-12) - float(least_host.sum())
    for index, group in enumerate(problem.groups):
        masks[index] &= np.asarray(group.memory - least[index] + np.maximum(group.temporary, always) <= spare)
        masks[index] &= np.asarray(group.host - least_host[index] <= spare_host)


@dataclass(frozen=True)
class DropDominated:
    """Drops choices that another choice of the group replaces at no greater cost, memory, temporary and host memory."""

    name: ClassVar[str] = "drop-dominated"
    dominance_memo: ReductionMemo = field(default_factory=ReductionMemo, repr=False)

    def apply(self, problem: Problem) -> tuple[Problem, Inverse]:
        masks, substitutes = undominated(problem, self.dominance_memo)
        if all(mask.all() for mask in masks):
            return problem, SameChoices()
        return _fewer(problem, masks, substitutes)


@dataclass(frozen=True)
class SimplifyTransfers:
    """Rewrites every transfer to its smallest form. Costs that depend on one group alone move to that group."""

    name: ClassVar[str] = "simplify-transfers"
    edge_memo: ReductionMemo = field(default_factory=ReductionMemo, repr=False)

    def apply(self, problem: Problem) -> tuple[Problem, Inverse]:
        return simplify(problem, self.edge_memo), SameChoices()


@dataclass(frozen=True)
class EliminateGroups:
    """Folds groups without memory into their neighbours, if their transfers join them to at most two other groups. The
    transfer that replaces group g has cost[p, q] = min over its choices k of cost_in[p, k] + cost_g[k] +
    cost_out[k, q]."""

    name: ClassVar[str] = "eliminate-groups"

    def apply(self, problem: Problem) -> tuple[Problem, Inverse]:
        smaller, remaining, folds, offset = eliminate(problem)
        if not folds:
            return problem, SameChoices()
        return smaller, FewerGroups(remaining, tuple(folds), len(problem.groups), offset)


def reductions() -> tuple[Reduction, ...]:
    """All reductions, in the order of a round. They remember where they found nothing to do, so they must not be reused
    for another problem."""
    return _in_order(DropForbidden(), SimplifyTransfers(), DropDominated(), BoundMemory())


def _in_order(
    forbidden: DropForbidden, simplified: SimplifyTransfers, dominated: DropDominated, bounded: BoundMemory
) -> tuple[Reduction, ...]:
    return (forbidden, bounded, simplified, forbidden, dominated, simplified, EliminateGroups())


def size_of(problem: Problem) -> tuple[int, int, int]:
    """The sizes with which the integer program grows: groups, choices, and (row, column) pairs of all transfers times
    their consumers."""
    choices = sum(len(group.cost) for group in problem.groups)
    return len(problem.groups), choices, sum(t.cost.size * len(t.consumers) for t in problem.transfers)


def is_impossible(problem: Problem) -> bool:
    """Whether some group has no choice left."""
    return any(len(group.cost) == 0 for group in problem.groups)


# Chosen: most problems shrink no more after six rounds.
ROUNDS = 8


def reduce(problem: Problem, rounds: int = ROUNDS) -> tuple[Problem, Chain]:
    """Applies all reductions, and repeats them while they shrink the problem. Check :func:`is_impossible` on the
    result."""
    return _reduced(problem, reductions(), rounds)


def _reduced(problem: Problem, steps: tuple[Reduction, ...], rounds: int = ROUNDS) -> tuple[Problem, Chain]:
    links: list[Inverse] = []
    for _ in range(rounds):
        before = size_of(problem)
        for reduction in steps:
            problem, inverse = reduction.apply(problem)
            links.append(inverse)
            if is_impossible(problem):
                return problem, Chain(tuple(links))
        if size_of(problem) == before:
            break
    return problem, Chain(tuple(links))


@dataclass(frozen=True, eq=False)
class ReducedForAnyLimit:
    """A ``problem`` as it is reduced whatever the limit of the device's memory is. Nothing but that limit, in
    :meth:`within`, has to be looked at again."""

    problem: Problem
    chain: Chain
    forbidden: DropForbidden
    simplified: SimplifyTransfers
    dominated: DropDominated

    @staticmethod
    def of(problem: Problem) -> ReducedForAnyLimit:
        forbidden, simplified, dominated = DropForbidden(), SimplifyTransfers(), DropDominated()
        free = replace(problem, memory_limit=float("inf"))
        reduced, chain = _reduced(free, _in_order(forbidden, simplified, dominated, BoundMemory(keeps=True)))
        return ReducedForAnyLimit(reduced, chain, forbidden, simplified, dominated)

    def within(self, limit: float) -> tuple[Problem, Chain]:
        """The problem with a limit, reduced as far as :func:`reduce` does, and the inverse from here on."""
        limited = replace(self.problem, memory_limit=limit)
        if is_impossible(limited):
            return limited, Chain(())
        forbidden = DropForbidden(self.forbidden.finite.copy())
        simplified = SimplifyTransfers(self.simplified.edge_memo.copy())
        dominated = DropDominated(self.dominated.dominance_memo.copy())
        return _reduced(limited, _in_order(forbidden, simplified, dominated, BoundMemory()))
