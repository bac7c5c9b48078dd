"""Solves within the remaining planning time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.options import Options
from autopar.solver.problem import Ints, Problem, Solution
from autopar.solver.shared_reductions import SharedReductions

from .timings import Timings


def solve_in_time(
    problem: Problem,
    options: Options,
    timings: Timings,
    incumbents: Sequence[Ints] = (),
    least_gap: float = 0.0,
    worth: float = math.inf,
    most: float = math.inf,
    reductions: SharedReductions | None = None,
) -> Solution:
    """Solves in at most half of the remaining time, so that a hard program leaves time for those after it. A program
    that needs less is solved as it would be with any other limit. The gap is that of ``options``, or ``least_gap`` if
    that is larger. ``worth`` and ``reductions``: as for :func:`~autopar.solver.solve.solve`; ``most``: seconds that it
    may take at most, whatever remains."""
    from autopar.solver.solve import solve  # Here, since it loads what a cached plan does without.

    solution = solve(
        problem,
        time_limit=min(timings.left(options) / 2, most),
        gap=max(options.gap, least_gap),
        seed=options.solver_seed,
        incumbents=incumbents,
        counted=timings.counts(options),
        worth=worth,
        reductions=reductions,
    )
    timings.solving += solution.seconds
    timings.cut_off |= solution.status == "feasible"
    return solution
