"""The time that planning took, by phase, and what remains of its time limit, within which programs are solved."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from autopar.options import Options
from autopar.solver.problem import Ints, Problem, Solution
from autopar.solver.shared_reductions import SharedReductions

from .memory_advice import AdviceBudget


@dataclass
class Timings:
    """CPU seconds by phase, and the seconds that solvers used: CPU time or, without ``Options.time_limit`` or if all is
    ``counted``, counted work (:mod:`autopar.solver.budget`). ``cut_off``: whether a search for placements ended before
    it had proven its gap. ``reuses``: whether placements were taken that another limit of memory had found.
    ``advises``: whether errors for what does not fit say what would; ``advice``: what remains of the searches for that,
    once there was one."""

    seconds: dict[str, float] = field(default_factory=dict)
    solving: float = 0.0
    counted: bool = False
    cut_off: bool = False
    reuses: bool = False
    advises: bool = True
    advice: AdviceBudget | None = None

    def counts(self, options: Options) -> bool:
        """Whether solvers are limited by counted work."""
        return self.counted or options.time_limit is None

    def left(self, options: Options) -> float:
        return max(options.solver_seconds - self.solving, 0.0)

    def is_spent(self, options: Options) -> bool:
        """Whether too little time remains to solve anything. Each program uses at most half of what remains."""
        # Chosen: about what is left after five or six programs.
        return self.left(options) <= 0.02 * options.solver_seconds

    def is_up(self, options: Options) -> bool:
        """Whether the time that a user gave is spent."""
        return options.time_limit is not None and self.is_spent(options)

    def reserve(self, options: Options, share: float) -> None:
        """Leaves at least a ``share`` of counted work for what comes next; of seconds that a user limits nothing can be
        had back."""
        if options.time_limit is None:
            self.solving = min(self.solving, (1.0 - share) * options.solver_seconds)

    def advising(self, options: Options, nodes: int, devices: int) -> AdviceBudget:
        """The one budget of all advice for a plan, of a graph of so many ``nodes``."""
        if self.advice is None:
            self.advice = AdviceBudget.of(options, nodes, devices, self.solving)
        return self.advice

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


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
