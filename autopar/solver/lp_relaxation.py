"""Solves the linear relaxation exactly, through ``ortools.math_opt``, where message passing stops short of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .budget import Budget
from .message_passing import Messages
from .milp import MixedIntegerProgram, build, host_unit, nonzeros
from .outcome import Outcome
from .problem import Floats, Ints, Problem


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The solved relaxation. ``bound``: no assignment costs less. ``slack[i][k]``: no assignment with choice k of group
    i costs less than bound + slack. ``rounded``: the choices of greatest weight (empty: the solver ran out of time).
    ``feasible`` is False if nothing satisfies the constraints."""

    bound: float
    slack: tuple[Floats, ...]
    rounded: Ints
    feasible: bool = True


def relax(problem: Problem, budget: Budget, seed: int = 0) -> Relaxation:
    """Solves the linear relaxation."""
    nothing = tuple(np.zeros(len(group.cost)) for group in problem.groups)
    if not budget.may_relax(nonzeros(problem)):
        return Relaxation(-np.inf, nothing, np.zeros(0, dtype=np.int64))
    program = build(problem)
    outcome = budget.relax(program, seed)
    rounded = round_up(problem, program, outcome)
    if outcome.status == "infeasible":
        return Relaxation(np.inf, nothing, rounded, feasible=False)
    if outcome.status != "optimal" or not len(outcome.duals):
        return Relaxation(-np.inf, nothing, rounded)
    messages = load(problem, program, outcome)
    return Relaxation(messages.bound, messages.slack(), rounded)


def round_up(problem: Problem, program: MixedIntegerProgram, outcome: Outcome) -> Ints:
    """For each group, the choice of greatest x; empty if there is no solution."""
    if not len(outcome.values):
        return np.zeros(0, dtype=np.int64)
    sizes = [len(group.cost) for group in problem.groups]
    picks = [np.argmax(outcome.values[f : f + n]) for f, n in zip(program.first, sizes, strict=True)]
    return np.array(picks, dtype=np.int64)


def load(problem: Problem, program: MixedIntegerProgram, outcome: Outcome) -> Messages:
    """The solver's dual prices as messages. They certify the bound, independently of the solver's tolerances."""
    messages = Messages(problem)
    slots = iter(messages.slots)
    slot_of = {(t, c): next(slots) for t, tr in enumerate(problem.transfers) for c in range(len(tr.consumers))}
    row = 0
    for family, labels in program.families:
        duals = outcome.duals[row : row + len(labels)] * program.unit
        row += len(labels)
        if family == "memory":
            messages.price = max(0.0, -float(duals[0])) / program.memory_unit
        elif family == "host":
            messages.host_price = max(0.0, -float(duals[0])) / host_unit(problem)
        elif family == "temporary" and messages.price > 0:
            messages.weights[labels] = np.maximum(duals, 0.0) / (program.memory_unit * messages.price)
        elif family == "leaves_row":
            slot_of[int(labels[0, 0]), int(labels[0, 1])].u = duals
        elif family == "enters_column":
            slot_of[int(labels[0, 0]), int(labels[0, 1])].v = duals
    total = float(messages.weights.sum())
    if total > 1.0:
        messages.weights /= total
    for shared in messages.shared:
        shared.pool()
    messages.refresh()
    return messages
