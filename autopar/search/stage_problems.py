"""The placement programs of one pipeline: of the uncut graph, on the mesh inside a stage, for all stages together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest, mesh_candidates
from autopar.planner.solve_mesh import solve_only
from autopar.planner.timings import Timings

# What a stage takes may be so much less than its share of the program's bound: the program hides messages under the
# computing of all stages, a cost breakdown under that of one (4% apart in seven of eight plans, 11% in the other).
SAFETY_FACTOR = 1.15


@dataclass
class StagePrograms:
    """Solves them for ``request`` (of the mesh inside a stage). A pipeline is sought again with less memory only while
    it could be quicker than ``best`` seconds."""

    request: PlanRequest
    best: float
    timings: Timings
    _least: float = field(default=0.0, init=False)

    def solve(self, graph: Graph, repeats: Repeats, limit: float, host: float) -> MeshSolution:
        """The best answer within ``limit`` bytes of a device of each stage together, and ``host`` of their hosts.

        All stages share the work of a step, so that one of them takes at least its part of the seconds without a memory
        limit: less memory makes nothing quicker. Raises :class:`InfeasibleError` if nothing fits, or if something was
        found before that did not do and could not have won."""
        if self._least > SAFETY_FACTOR * self.best:
            raise InfeasibleError(
                f"{repeats.stages} stages take at least {self._least:.3g} s: not sought with less memory"
            )
        limited = replace(self.request, repeats=repeats, memory_limit=limit, host_limit=host)
        solved = [
            solve_only(replace(limited, mesh=mesh), graph, self.timings) for mesh in mesh_candidates(self.request)
        ]
        self._least = min(one.unlimited for one in solved) / repeats.stages
        return min(solved, key=lambda one: one.breakdown.seconds)
