"""Solves the placement programs of one pipeline. They place the uncut graph on the mesh inside a stage, for all stages
together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest
from autopar.planner.row_shares import divisions, on_mesh
from autopar.planner.solve_mesh import solve_only
from autopar.planner.timings import Timings

from .stage_devices import blocks_worth

# A stage may take less than its share of the program's bound, by up to this factor: the program overlaps messages with
# the computation of all stages, a cost breakdown with that of one (4% apart in seven of eight plans, 11% in the other).
SAFETY_FACTOR = 1.15


@dataclass
class StagePrograms:
    """The placement programs for ``request`` (for the mesh inside a stage). A pipeline is searched again with less
    memory only while it could be quicker than ``best`` seconds."""

    request: PlanRequest
    best: float
    timings: Timings
    _least: float = field(default=0.0, init=False)

    def solve(self, graph: Graph, repeats: Repeats, limit: float, host: float) -> MeshSolution:
        """The best solution within ``limit`` bytes, summed over one device of each stage, and ``host`` bytes of their
        hosts.

        All stages share the work of a step, so at least one of them takes its share of the seconds without a memory
        limit (a quicker one, a larger share); a lower limit makes nothing quicker. Raises :class:`InfeasibleError` if
        nothing fits, or if an earlier solution shows that no pipeline can beat ``best``."""
        if self._least > SAFETY_FACTOR * self.best:
            raise InfeasibleError(
                f"{repeats.stages} stages take at least {self._least:.3g} s: not searched with less memory"
            )
        limited = replace(self.request, repeats=repeats, memory_limit=limit, host_limit=host)
        tried = divisions(self.request, max(1, self.request.batch // repeats.microbatches))
        solved = [solve_only(on_mesh(limited, division), graph, self.timings) for division in tried]
        unequal = bool(self.request.cluster.groups)
        self._least = min(
            solution.unlimited / (blocks_worth(solution, repeats.stages) if unequal else repeats.stages)
            for solution in solved
        )
        return min(solved, key=lambda solution: solution.breakdown.seconds)
