"""Solves linear and integer programs with HiGHS, through ``ortools.math_opt``: limits, parameters and outcomes."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
from ortools.math_opt import model_parameters_pb2, model_pb2, result_pb2
from ortools.math_opt.core.python import solver as math_opt_solver
from ortools.math_opt.python import mathopt

from .milp import MixedIntegerProgram
from .outcome import Effort, Outcome
from .problem import Floats

# A solver stopped by the clock had enough CPU time if it got this share of its limit. Otherwise it is run again with
# the rest of its CPU seconds, and at most so many times longer by the clock. If the machine is idle by then, it may use
# all of that time.
# Chosen, not measured.
ENOUGH, MOST_BUSY = 0.8, 3.0
# Integer programs with fewer nonzeros are solved without presolve: 415 programs with up to 488 nonzeros and 151
# variables took at most 25 ms. Presolve was seen to hang on a program of 28 nonzeros and 11 variables
# (``tests/solver/test_solve.py``), but on none of 400 other random problems. The reason is unknown.
LEAST_PRESOLVED = 500
# That program ends if presolve does not substitute by equations of two variables; no other rule matters for it. This is
# the bit of the rule in HiGHS's ``presolve_rule_off``.
DOUBLETON_EQUATION = 1 << 9


def run(program: MixedIntegerProgram, relaxed: bool, effort: Effort) -> Outcome:
    """Solves the program, or with ``relaxed`` its linear relaxation.

    HiGHS's presolve calls some integer programs infeasible that are not (``tests/solver/test_solve.py`` has one), so
    such a result is confirmed without presolve. For some programs with a dozen variables, presolve never ends, whatever
    the time limit, so programs that small are solved without it.
    """
    if not relaxed and len(program.value) < LEAST_PRESOLVED:
        effort = replace(effort, presolve=False)
    outcome = _run_for(program, relaxed, effort)
    if outcome.status == "infeasible" and effort.presolve and not relaxed:
        return _run_for(program, relaxed, replace(effort, presolve=False))
    return outcome


def _run_for(program: MixedIntegerProgram, relaxed: bool, effort: Effort) -> Outcome:
    """Solves within ``effort.time_limit`` CPU seconds. The solver itself counts wall-clock time. If other load kept the
    processor from it until its time ran out, it is run once more for the missing CPU seconds, with a wall-clock limit
    that is longer in proportion to the load. In all it uses at most ``MOST_BUSY`` times the limit."""
    seconds = max(effort.time_limit, 0.01)
    wall, computing = time.monotonic(), time.process_time()
    result = _run(program, relaxed, replace(effort, time_limit=seconds))
    wall, computing = time.monotonic() - wall, time.process_time() - computing
    if result.termination.limit == result_pb2.LIMIT_TIME and computing < ENOUGH * seconds:
        longer = min(wall / max(computing, 1e-3 * wall), MOST_BUSY)
        again = _run(program, relaxed, replace(effort, time_limit=longer * (seconds - computing)))
        return _better(program, relaxed, _read(program, result), _read(program, again))
    return _read(program, result)


def _better(program: MixedIntegerProgram, relaxed: bool, first: Outcome, second: Outcome) -> Outcome:
    """The combined outcome of two runs. The second run may have been the shorter one."""
    if relaxed or second.status in ("optimal", "infeasible"):
        return second
    feasible = [outcome for outcome in (second, first) if len(outcome.values)]
    best = min(feasible, key=lambda outcome: float(program.cost @ outcome.values), default=second)
    return replace(best, bound=max(first.bound, second.bound))


def _run(program: MixedIntegerProgram, relaxed: bool, effort: Effort) -> result_pb2.SolveResultProto:
    """Solves within ``effort.time_limit`` wall-clock seconds."""
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=effort.time_limit),
        node_limit=None if relaxed else effort.nodes,
        random_seed=effort.seed,
        relative_gap_tolerance=None if relaxed else effort.gap,
        lp_algorithm=mathopt.LPAlgorithm[effort.algorithm] if effort.algorithm else None,
        presolve=None if effort.presolve else mathopt.Emphasis.OFF,
    )
    if not relaxed:
        parameters.highs.int_options["presolve_rule_off"] = DOUBLETON_EQUATION
    return math_opt_solver.solve(
        to_proto(program, relaxed), mathopt.SolverType.HIGHS.value, mathopt.StreamableSolverInitArguments().to_proto(),
        parameters.to_proto(), model_parameters_pb2.ModelSolveParametersProto(), None,
        mathopt.CallbackRegistration().to_proto(), None, None,
    )  # fmt: skip


def to_proto(program: MixedIntegerProgram, relaxed: bool) -> model_pb2.ModelProto:
    """The program for math_opt; ``relaxed`` drops integrality."""
    model = model_pb2.ModelProto()
    size = len(program.cost)
    model.variables.ids.extend(range(size))
    model.variables.lower_bounds.extend([0.0] * size)
    model.variables.upper_bounds.extend(np.where(program.binary, 1.0, np.inf).tolist())
    model.variables.integers.extend(([False] * size) if relaxed else program.binary.tolist())
    priced = np.flatnonzero(program.cost)
    model.objective.linear_coefficients.ids.extend(priced.tolist())
    model.objective.linear_coefficients.values.extend(program.cost[priced].tolist())
    model.linear_constraints.ids.extend(range(len(program.lower)))
    model.linear_constraints.lower_bounds.extend(program.lower.tolist())
    model.linear_constraints.upper_bounds.extend(program.upper.tolist())
    model.linear_constraint_matrix.row_ids.extend(program.row.tolist())
    model.linear_constraint_matrix.column_ids.extend(program.column.tolist())
    model.linear_constraint_matrix.coefficients.extend(program.value.tolist())
    return model


_STATUS = {
    result_pb2.TERMINATION_REASON_OPTIMAL: "optimal",
    result_pb2.TERMINATION_REASON_FEASIBLE: "feasible",
    result_pb2.TERMINATION_REASON_INFEASIBLE: "infeasible",
    result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED: "infeasible",
}


def _read(program: MixedIntegerProgram, result: result_pb2.SolveResultProto) -> Outcome:
    status = _STATUS.get(result.termination.reason, "unknown")
    bound = result.termination.objective_bounds.dual_bound * program.unit
    values, duals = np.zeros(0), np.zeros(0)
    for solution in result.solutions:
        if solution.HasField("primal_solution") and not len(values):
            values = _dense(solution.primal_solution.variable_values, len(program.cost))
        if solution.HasField("dual_solution") and not len(duals):
            duals = _dense(solution.dual_solution.dual_values, len(program.lower))
    return Outcome(status, values, float(bound), duals, int(result.solve_stats.simplex_iterations))


def _dense(vector: object, size: int) -> Floats:
    dense = np.zeros(size)
    dense[np.array(vector.ids, dtype=np.int64)] = np.array(vector.values)  # type: ignore[attr-defined]
    return dense
