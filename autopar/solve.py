"""Where price meets choice: the least-cost assignment of a :class:`~autopar.problem.Problem`, with a proof of how good it is.

The program, with its constraints named as the exported model names them (:func:`autopar.solve_program.export`)::

    minimise    sum_i sum_k cost_i[k] x[i,k]  +  sum_t sum_{p,q} cost_t[p,q] z[t,p,q]
    one_choice[i]         sum_k x[i,k] = 1
    leaves_row[t,c,p]     sum_q e[t,c,p,q] = sum_{k: source[k]=p} x[producer,k]
    enters_column[t,c,q]  sum_p e[t,c,p,q] = sum_{k: target_c[k]=q} x[consumer,k]
    shared[t,c,p,q]       z[t,p,q] >= e[t,c,p,q]           (a column only one consumer can need: z is that e)
    memory                fixed + sum_i sum_k memory_i[k] x[i,k] + T <= memory_limit
    temporary[i]          T >= sum_k temporary_i[k] x[i,k]
    x binary, e >= 0, z >= 0

The e of one consumer are a transport plan between the two ends' choices, which makes the relaxation the local polytope of
the pairwise problem (Wainwright and Jordan 2008, section 4.1): nearly integral in practice. z is paid once however many consumers need a column.

Method: (1) exact reductions (:mod:`autopar.reduce`); (2) incumbents by coordinate descent (:mod:`autopar.solve_local`); (3) the linear relaxation;
its value bounds the optimum, its solution is rounded and repaired; (4) choices whose reduced cost exceeds the distance between incumbent
and bound cannot improve on it and go (reduced-cost fixing, Dantzig, Fulkerson and Johnson 1954), and (1) again; (5) branch and cut on what is left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .problem import Floats, Ints, Problem, Solution, evaluate, memory_of
from .reduce import Chain, DropForbidden, FewerChoices, is_impossible, keep_choices, reduce
from .solve_local import Neighbourhood, fits, polish, repair, smallest
from .solve_program import Answer, Effort, Program, build, run

_NONE = np.zeros(0, dtype=np.int64)


@dataclass
class _Search:
    """The state of one solve: best choices of the original problem so far and the best proven bound."""

    problem: Problem
    deadline: float
    gap: float
    seed: int
    choices: Ints = field(default_factory=lambda: _NONE)
    objective: float = float("inf")
    bound: float = float("-inf")
    # What reduced-cost fixing dropped costs at least this much: bounds of what is left are no better.
    floor: float = float("inf")

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def closed(self) -> bool:
        return len(self.choices) > 0 and self.objective - self.bound <= max(self.gap, 1e-6) * abs(self.objective) + 1e-15

    def offer(self, choices: Ints | None) -> None:
        """Keeps ``choices`` (of the original problem) if they fit and are the cheapest yet."""
        if choices is None or memory_of(self.problem, choices) > self.problem.memory_limit:
            return
        objective = evaluate(self.problem, choices)
        if objective < self.objective:
            self.choices, self.objective = choices, objective

    def prove(self, bound: float) -> None:
        """Raises the bound; one above the incumbent is rounding error, or says that nothing beats it."""
        if not np.isnan(bound):
            self.bound = min(max(self.bound, bound), self.objective)


def solve(
    problem: Problem, *, time_limit: float = 60, gap: float = 0.005, seed: int = 0, incumbents: Sequence[Ints] = ()
) -> Solution:
    """The cheapest assignment within the memory limit.

    ``gap``: stop when (objective - bound) / objective is at most this. ``time_limit`` in seconds, kept approximately.
    ``incumbents``: known assignments, one choice per group, that need not fit. The result is never worse than any that fits. The same
    input gives the same result unless the time limit cuts the search off.

    Raises ValueError for a transfer with a negative or undefined price.
    """
    start = time.monotonic()
    _check(problem)
    search = _Search(problem, start + time_limit, gap, seed)
    for choices in incumbents:
        search.offer(np.asarray(choices, dtype=np.int64))
    status = _explore(search)
    if status == "infeasible":
        return Solution(_NONE, float("inf"), float("inf"), status, time.monotonic() - start)
    return Solution(search.choices, search.objective, search.bound, status, time.monotonic() - start)


def _check(problem: Problem) -> None:
    for transfer in problem.transfers:
        if not (transfer.cost >= 0).all():
            p, q = np.argwhere(~(transfer.cost >= 0))[0]
            raise ValueError(f"transfer {transfer.name}: cost[{p}, {q}] is {transfer.cost[p, q]}, which is no price")
    for group in problem.groups:
        if np.isnan(group.cost).any():
            raise ValueError(f"group {group.name}: the cost of choice {int(np.argmax(np.isnan(group.cost)))} is not a number")


def _explore(search: _Search) -> str:
    """Solves into ``search``; the status."""
    reduced, chain = reduce(search.problem)
    if is_impossible(reduced) or _too_large(reduced):
        return "infeasible"
    search.prove(_trivial_bound(reduced) + chain.offset)
    answer = _relax(search, reduced, chain)
    if answer is None:
        return "infeasible"
    for _ in range(4):
        if search.closed or answer is None or search.left <= 0:
            break
        smaller, links = _fix(search, reduced, chain, answer)
        shrunk = _choices(smaller) < 0.8 * _choices(reduced)
        reduced, chain = smaller, links
        if is_impossible(reduced):
            search.prove(search.floor)
            break
        if not shrunk:
            break
        answer = _relax(search, reduced, chain)
        if answer is None:
            search.prove(search.floor)
    if not search.closed and not is_impossible(reduced) and answer is not None and search.left > 0:
        exhausted = _branch(search, reduced, chain)
        if exhausted and not len(search.choices):
            return "infeasible"
    return _status(search)


def _status(search: _Search) -> str:
    if len(search.choices):
        return "optimal" if search.closed else "feasible"
    # The time is over and nothing fits yet: the least memory is the last thing worth trying.
    choices = _smallest_choices(search.problem, max(5.0, search.left))
    search.offer(choices)
    return "feasible" if len(search.choices) else "infeasible"


def _choices(problem: Problem) -> int:
    return sum(len(group.cost) for group in problem.groups)


def _too_large(problem: Problem) -> bool:
    """Whether even the smallest choices, transfers not looked at, exceed the memory limit."""
    if not problem.groups or np.isinf(problem.memory_limit):
        return problem.memory_fixed > problem.memory_limit
    return memory_of(problem, smallest(problem)) > problem.memory_limit


def _trivial_bound(problem: Problem) -> float:
    return sum(float(group.cost.min()) for group in problem.groups)


def _relax(search: _Search, problem: Problem, chain: Chain) -> Answer | None:
    """Solves the linear relaxation, proves its bound and offers roundings; None if there is no solution."""
    if not problem.groups:
        search.offer(chain.expand(_NONE))
        search.prove(min(chain.offset, search.floor))
        return Answer("optimal", np.zeros(0), chain.offset, np.zeros(0))
    program = build(problem)
    answer = run(program, True, Effort(search.left, seed=search.seed))
    if answer.status == "infeasible":
        return None
    search.prove(min(answer.bound + chain.offset, search.floor))
    near = Neighbourhood.of(problem)
    for start in _starts(problem, program, answer):
        found = repair(near, start)
        search.offer(None if found is None else chain.expand(found))
        if search.closed:
            break
    return answer


def _starts(problem: Problem, program: Program, answer: Answer) -> list[Ints]:
    """Where the descent starts: the rounded relaxation, then the cheapest choices, then the smallest."""
    starts = []
    if len(answer.values):
        starts.append(_rounded(problem, program, answer.values))
    starts.append(np.array([np.argmin(group.cost) for group in problem.groups], dtype=np.int64))
    if np.isfinite(problem.memory_limit):
        starts.append(smallest(problem))
    return starts


def _rounded(problem: Problem, program: Program, values: Floats) -> Ints:
    sizes = [len(group.cost) for group in problem.groups]
    picks = [np.argmax(values[f : f + n]) for f, n in zip(program.first, sizes, strict=True)]
    return np.array(picks, dtype=np.int64)


def _fix(search: _Search, problem: Problem, chain: Chain, answer: Answer) -> tuple[Problem, Chain]:
    """Without the choices that cannot improve the incumbent by more than the gap, and reduced again."""
    if not len(answer.reduced) or not len(search.choices):
        return problem, chain
    threshold = search.objective - max(0.9 * search.gap, 1e-7) * abs(search.objective)
    sizes = np.cumsum([len(group.cost) for group in problem.groups])[:-1]
    masks = np.split(answer.bound + chain.offset + answer.reduced < threshold, sizes)
    kept = [np.flatnonzero(mask) for mask in masks]
    search.floor = min(search.floor, threshold)
    fewer = keep_choices(problem, masks)
    position = tuple(np.where(m, np.cumsum(m) - 1, -1).astype(np.int64) for m in masks)
    link = FewerChoices(tuple(kept), position)
    if is_impossible(fewer):
        return fewer, Chain((chain, link))
    reduced, rest = reduce(fewer)
    return reduced, Chain((chain, link, rest))


def _branch(search: _Search, problem: Problem, chain: Chain) -> bool:
    """Branch and cut; True if it searched everything."""
    program = build(problem)
    value = search.objective - chain.offset
    gap = search.gap * abs(search.objective / value) if np.isfinite(value) and value else search.gap
    answer = run(program, False, Effort(search.left, gap=min(gap, 1.0), seed=search.seed))
    if answer.status == "infeasible":
        search.prove(search.floor)
        return True
    if len(answer.values):
        found = _rounded(problem, program, answer.values)
        search.offer(chain.expand(found))
        if fits(problem, found):
            search.offer(chain.expand(polish(Neighbourhood.of(problem), found)))
    search.prove(min(answer.bound + chain.offset, search.floor))
    return answer.status == "optimal"


def smallest_memory(problem: Problem, time_limit: float = 30.0) -> float:
    """The least peak bytes of any assignment of finite cost; infinite if there is none."""
    choices = _smallest_choices(problem, time_limit)
    return float("inf") if choices is None else memory_of(problem, choices)


def _smallest_choices(problem: Problem, time_limit: float) -> Ints | None:
    bare, inverse = DropForbidden().apply(replace(problem, memory_limit=float("inf")))
    if is_impossible(bare):
        return None
    if not bare.groups:
        return _NONE
    choices = smallest(bare)
    if not np.isfinite(evaluate(bare, choices)):
        program = build(bare, objective="memory")
        answer = run(program, False, Effort(time_limit))
        if not len(answer.values):
            return None
        choices = _rounded(bare, program, answer.values)
    return inverse.expand(choices)
