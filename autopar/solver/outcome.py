"""What a run of a solver may take, and what comes of it. Without the solver's library, which takes long to import."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Floats


@dataclass(frozen=True)
class Effort:
    """Limits of a solver run: ``time_limit`` in CPU seconds, independent of other load of the machine, and at most
    ``nodes`` nodes of the search tree (None: any number). ``algorithm`` is math_opt's name of an algorithm for linear
    programs ("" leaves it to the solver)."""

    time_limit: float
    gap: float = 0.0
    seed: int = 0
    algorithm: str = ""
    presolve: bool = True
    nodes: int | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a solver run: ``values`` of all variables (empty: no solution was found), a proven ``bound`` in
    seconds, and the ``duals`` of all rows in units of the program (linear programs only). ``status``: "optimal",
    "feasible", "infeasible" or "unknown". ``iterations``: of the simplex method."""

    status: str
    values: Floats
    bound: float
    duals: Floats
    iterations: int = 0
