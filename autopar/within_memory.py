"""The placement program within its memory limit: recomputation joins it only where it is needed.

Recomputing costs time and saves nothing but memory. A solution of the program without it that fits, found as if there
were no limit, is therefore the answer; only if it does not fit is the larger program solved, in which every saved value
is kept or recomputed (:mod:`.instance`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.passes.recomputable import Recomputable, recomputable

from .assignment import Again
from .graph import REST, Node
from .instance import Choice, Instance, build_instance
from .problem import Ints, Solution, evaluate, memory_of
from .restrict import with_choices

Solve = Callable[[Instance, Sequence[Ints]], Solution]
ROUNDS = 4


def fits(instance: Instance, solution: Solution) -> bool:
    """Whether a solution of a restricted instance is one of ``instance``."""
    return (
        solution.status != "infeasible"
        and memory_of(instance.problem, solution.choices) <= instance.problem.memory_limit
        and math.isfinite(evaluate(instance.problem, solution.choices))
    )


def without_limit(instance: Instance) -> Instance:
    return replace(instance, problem=replace(instance.problem, memory_limit=math.inf))


def solve_within(
    policy: str | None, plain: Instance, widen: Callable[[], Instance], solve: Solve, incumbents: Sequence[Ints]
) -> tuple[Instance, Solution]:
    """The solved instance: ``plain`` where that does, else what ``widen`` makes of it. ``incumbents`` are choices of
    ``plain``, which mean the same in both."""
    if policy == "none":
        return plain, solve(plain, [c for c in incumbents if _within(plain, c)])
    if policy is None:
        free = solve(without_limit(plain), incumbents)
        if fits(plain, free):
            return plain, free
        incumbents = [free.choices, *incumbents] if free.status != "infeasible" else incumbents
    wide = widen()
    return wide, solve_wide(wide, solve, incumbents)


def solve_wide(wide: Instance, solve: Solve, incumbents: Sequence[Ints]) -> Solution:
    """The solution of an instance with recomputation, from choices of the one without."""
    return solve(wide, [*incumbents, *_recomputing(wide, incumbents)])


def _within(instance: Instance, choices: Ints) -> bool:
    return memory_of(instance.problem, choices) <= instance.problem.memory_limit


def with_recomputation(plain: Instance, policy: str | None) -> Instance:
    """The instance in which values may be recomputed: any (None), or just those the ``policy`` names."""
    possible = recomputable(plain.graph)
    wide = build_instance(
        plain.graph,
        plain.prices,
        optimizer=plain.optimizer,
        memory_limit=plain.problem.memory_limit,
        repeats=plain.repeats,
        again=possible,
    )
    if policy is None:
        return wide
    dropped = possible.full if policy == "full" else possible.selective
    return with_choices(wide, _follows(wide, dropped))


def _follows(wide: Instance, dropped: frozenset[str]) -> Callable[[Node, Choice], bool]:
    def allowed(node: Node, choice: Choice) -> bool:
        return node.op != REST or isinstance(choice, Again) == (node.name in dropped)

    return allowed


def _recomputing(wide: Instance, incumbents: Sequence[Ints]) -> Iterator[Ints]:
    """The first of ``incumbents`` with less and less of it kept, to start from."""
    assert wide.again is not None
    rests = frozenset(name for name in wide.again.nodes if wide.graph[name].op == REST)
    for choices in incumbents[:1]:
        for dropped in (wide.again.selective, _cheap(wide.again), wide.again.full, rests):
            yield _with_again(wide, choices, wide.again.chain(dropped))


def _cheap(again: Recomputable) -> frozenset[str]:
    """The rests that can be had again without a product."""
    rests = [n.name for n in again.graph.nodes if n.op == REST and n.name in again.nodes]
    return frozenset(r for r in rests if not any("mm" in again.graph[n].op for n in again.chain(frozenset((r,)))))


def _with_again(wide: Instance, choices: Ints, names: frozenset[str]) -> Ints:
    """``choices`` of an instance without recomputation, with all of ``names`` recomputed. The choices that recompute
    stand behind the others in the same order."""
    shift = [len(c) // 2 if name in names and isinstance(c[-1], Again) else 0 for name, c in _groups(wide)]
    return choices + np.array(shift, dtype=np.int64)


def _groups(instance: Instance) -> Iterator[tuple[str, tuple[Choice, ...]]]:
    return zip(instance.names, instance.choices, strict=True)


def tightened(instance: Instance, peak: int, limit: float) -> Instance | None:
    """The instance with less memory, if the answer's ``peak``, seen closer than the program can, exceeds ``limit``;
    None if it fits."""
    if peak <= limit:
        return None
    problem = instance.problem
    return replace(instance, problem=replace(problem, memory_limit=problem.memory_limit - 1.02 * (peak - limit)))
