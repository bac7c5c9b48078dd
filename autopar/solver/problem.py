"""The placement problem as arrays, independent of graphs and torch. :mod:`autopar.solver.solve` minimises it.

There are groups ``i`` with choices ``k``; ``x[i,k]`` is 1 for the one choice made in group i. A transfer ``t`` links one producer
group to consumer groups: the producer's choice leaves the tensor in row ``source[k]``, consumer c's choice needs it in
column ``target[c][k]``, and moving row p to column q costs ``cost[p, q]`` (infinite: forbidden), **once** however many consumers need column q.

    minimise    sum_i sum_k cost_i[k] x[i,k]  +  sum_t sum_{p,q} cost_t[p,q] max_c e[t,c,p,q]
    subject to  sum_k x[i,k] = 1                                            for every group                  (one_choice)
                sum_q e[t,c,p,q] = sum_{k: source[k]=p} x[producer,k]       for every t, c, p                (leaves_row)
                sum_p e[t,c,p,q] = sum_{k: target_c[k]=q} x[consumer,k]     for every t, c, q                (enters_column)
                fixed + sum_i sum_k memory_i[k] x[i,k] + T <= memory_limit                                   (memory)
                T >= sum_k temporary_i[k] x[i,k]                            for every group                  (temporary)
                sum_i sum_k host_i[k] x[i,k] <= host_limit                                                   (host)
                x binary, e >= 0

A *window* w consists of computing (the cost of some groups, or a part of it) and of messages that are sent meanwhile (the
cost of some transfers, or a part of it). A share ``hidden_w`` of the messages can be hidden behind the same share of the
computing. The exposed rest is a variable of its own: in the objective, that share of the messages is replaced by

                + sum_w E_w,   E_w >= hidden_w (messages_w - computing_w),  E_w >= 0                           (exposed)

which is hidden_w max(0, messages_w - computing_w).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Group:
    """A one-of-K decision. ``cost`` in seconds (infinite: forbidden), ``memory`` (adds up) and ``temporary`` (only the largest
    counts) in bytes of the device, ``host`` (adds up) in bytes of the host's memory, each of shape [K]. Multiplicities of
    folded layers are multiplied in already."""

    name: str
    cost: Floats
    memory: Floats
    temporary: Floats
    host: Floats


@dataclass(frozen=True, eq=False)
class Transfer:
    """A tensor that is moved from its producer to its consumers: ``source`` [K of producer] gives rows, ``targets[c]`` [K of
    consumer c] columns of ``cost`` [P, Q] (seconds, multiplicity included)."""

    name: str
    producer: int
    source: Ints
    consumers: tuple[int, ...]
    targets: tuple[Ints, ...]
    cost: Floats


@dataclass(frozen=True, eq=False)
class Window:
    """A window (see the module docstring): the ``groups`` that compute and the ``transfers`` that are sent meanwhile, by
    index, with the part of their cost that belongs to this window (the parts of all windows, each times ``hidden``, sum
    to at most 1), and ``hidden``, the share of both that can overlap."""

    name: str
    groups: Mapping[int, float]
    transfers: Mapping[int, float]
    hidden: float


@dataclass(frozen=True, eq=False)
class Problem:
    """A placement problem; see the module docstring. Limits may be infinite. ``memory_fixed``: bytes that no choice
    changes. ``memory_price``: about what a byte is worth in seconds under the limit of memory, where a search may begin;
    0: not known."""

    groups: tuple[Group, ...]
    transfers: tuple[Transfer, ...]
    memory_limit: float = float("inf")
    memory_fixed: float = 0.0
    windows: tuple[Window, ...] = ()
    host_limit: float = float("inf")
    memory_price: float = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether the device's or the host's memory has a limit."""
        return bool(np.isfinite(self.memory_limit) or np.isfinite(self.host_limit))


@dataclass(frozen=True, eq=False)
class Solution:
    """A solution: ``choices[i]`` for each group i. ``status`` is "optimal" (a gap within the requested one is proven),
    "feasible" or "infeasible" (``choices`` is then empty). ``gap`` is (objective - bound) / objective. ``seconds`` are CPU
    seconds or, if work was counted, counted ones. ``met``: assignments that fit and were the cheapest known at some
    time of the search; they may hold less than the last. ``memory_price``: that of the bound, in seconds per byte."""

    choices: Ints
    objective: float
    bound: float
    status: str
    seconds: float
    met: tuple[Ints, ...] = ()
    memory_price: float = 0.0

    @property
    def gap(self) -> float:
        if not np.isfinite(self.objective) or self.objective <= 0:
            return 0.0 if self.objective == self.bound else float("inf")
        return max(0.0, (self.objective - self.bound) / self.objective)


def evaluate(problem: Problem, choices: Ints) -> float:
    """The objective of a full assignment in seconds, by definition (no memory check)."""
    total = sum(float(group.cost[k]) for group, k in zip(problem.groups, choices, strict=True))
    total += sum(transfer_seconds(transfer, choices) for transfer in problem.transfers)
    if problem.windows and np.isfinite(total):
        total -= sum(window.hidden * min(sides_of(problem, window, choices)) for window in problem.windows)
    return total


def transfer_seconds(transfer: Transfer, choices: Ints) -> float:
    """Seconds that one transfer takes under a full assignment."""
    row = transfer.source[choices[transfer.producer]]
    columns = {int(t[choices[c]]) for c, t in zip(transfer.consumers, transfer.targets, strict=True)}
    return sum(float(transfer.cost[row, column]) for column in sorted(columns))


def sides_of(problem: Problem, window: Window, choices: Ints) -> tuple[float, float]:
    """Seconds of (messages, computing) of a window under a full assignment."""
    messages = sum(part * transfer_seconds(problem.transfers[t], choices) for t, part in window.transfers.items())
    return messages, sum(part * float(problem.groups[g].cost[choices[g]]) for g, part in window.groups.items())


def memory_of(problem: Problem, choices: Ints) -> float:
    """Peak bytes of a full assignment as the problem counts them."""
    pairs = list(zip(problem.groups, choices, strict=True))
    largest = max((float(group.temporary[k]) for group, k in pairs), default=0.0)
    return problem.memory_fixed + sum(float(group.memory[k]) for group, k in pairs) + largest


def host_of(problem: Problem, choices: Ints) -> float:
    """Bytes of host memory that a full assignment takes."""
    return sum(float(group.host[k]) for group, k in zip(problem.groups, choices, strict=True))


def is_within(problem: Problem, choices: Ints) -> bool:
    """Whether a full assignment is within both memory limits."""
    if np.isfinite(problem.host_limit) and host_of(problem, choices) > problem.host_limit:
        return False
    return memory_of(problem, choices) <= problem.memory_limit


def memory_binds(problem: Problem) -> bool:
    """Whether some assignment might count more than the limit of device memory."""
    largest = max((float(group.temporary.max()) for group in problem.groups), default=0.0)
    resting = sum(float(group.memory.max()) for group in problem.groups)
    return problem.memory_fixed + resting + largest > problem.memory_limit


def host_binds(problem: Problem) -> bool:
    """Whether some assignment would exceed the limit of host memory."""
    return sum(float(group.host.max()) for group in problem.groups) > problem.host_limit


def without_needless_host(problem: Problem) -> Problem:
    """The problem without host memory, if no assignment can exceed its limit."""
    if host_binds(problem):
        return problem
    groups = tuple(replace(g, host=np.zeros_like(g.cost)) if g.host.any() else g for g in problem.groups)
    return replace(problem, groups=groups, host_limit=float("inf"))
