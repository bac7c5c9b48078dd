"""The best plan without stages on every mesh that is worth trying, and what is known of such plans before they are
searched for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.options import without_stages
from autopar.placement.predicted import predicted
from autopar.planner.memory_limit import ShortOfMemoryError, TooSlowError
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import PlanRequest, asked_mesh
from autopar.planner.row_shares import Division as RowDivision
from autopar.planner.row_shares import bisected, divisions, divisions_by_memory, on_mesh
from autopar.planner.solve_mesh import is_short_of_memory, least_seconds, priced_baselines, solve_mesh
from autopar.planner.step_graphs import step_of
from autopar.planner.timings import Timings
from autopar.planner.to_plan import make_plan

from .candidate import NO_STAGES, Candidate, Excluded, Failure, Tried, named_axes
from .division_bounds import Division, covered
from .proposed import Least


def least_without_stages(request: PlanRequest, timings: Timings) -> Least:
    """What plans without stages take at least, unless it would take programs of several meshes to know. Solvers' work
    is not counted, since the search for such plans counts the same work."""
    own, used = replace(request, options=without_stages(request.options)), timings.solving
    graph = step_of(request)
    try:
        tried = divisions(own, request.batch)
        if len(tried) > 1:
            return Least()
        inside = on_mesh(own, tried[0])
        seconds, priced = least_seconds(inside, graph, timings)
    except (InfeasibleError, OptionsError):
        return Least()
    finally:
        timings.solving = used

    def excluded() -> Tried:
        return _excluded(inside, TooSlowError(f"plans on mesh {asked_mesh(inside)}", seconds), priced())

    return Least(seconds, excluded)


def why_too_large(request: PlanRequest, timings: Timings) -> ShortOfMemoryError | None:
    """Why the quickest placements without stages do not fit; None if they do, if there are none, or if it would take
    programs of several meshes to know. Solvers' work is not counted, as for :func:`least_without_stages`."""
    used, tried = timings.solving, divisions(request, request.batch)
    if len(tried) > 1:
        return None
    try:
        solve_mesh(replace(on_mesh(request, tried[0]), only_quickest=True), step_of(request), timings)
    except ShortOfMemoryError as error:
        return error if math.isfinite(error.seconds) else None
    except InfeasibleError:
        return None
    finally:
        timings.solving = used
    return None


def plans_without_stages(request: PlanRequest, timings: Timings) -> Tried:
    """The best plan on every candidate mesh, and why there is none on the others."""
    graph, batch = step_of(request), request.batch
    tried = divisions(request, batch)
    found, rest = _divided(request, graph, tried, timings)
    if request.cluster.groups and _lacks_memory(request, found, rest.failures):
        for ordered in divisions_by_memory(request, batch, tried):
            found += bisected(ordered, partial(_in_division, request, graph, timings), lambda own: own.saves_memory)
    candidates = Tried(tuple(own.candidate() for own in found))
    return replace(candidates + rest, failures=rest.failures[:1])


def _lacks_memory(request: PlanRequest, found: Sequence[_Whole], failures: Sequence[Failure]) -> bool:
    """Whether more memory would make the quickest of what was ``found`` quicker or, if nothing was, possible."""
    if not found:
        return any(not isinstance(failure.error, TooSlowError) for failure in failures)
    return is_short_of_memory(request, min(found, key=lambda own: own.seconds).solution)


@dataclass(frozen=True)
class _Whole:
    """The solution of a step without stages; ``inside``: the request for its division of the rows."""

    inside: PlanRequest
    graph: Graph
    solution: MeshSolution
    baselines: dict[str, Predicted | None]
    timings: Timings

    @property
    def seconds(self) -> float:
        return self.solution.breakdown.seconds

    @property
    def saves_memory(self) -> bool:
        return self.solution.saves_memory

    def candidate(self) -> Candidate:
        inside, solved = self.inside, self.solution
        make = partial(make_plan, inside, self.graph, solved, self.baselines, self.timings)
        figures, known = partial(_figures, inside, solved), covered(inside, 1, 1, (1,))
        lacks = is_short_of_memory(inside, solved)
        return Candidate(self.seconds, None, make, figures, self.baselines, divisions=known, lacks_memory=lacks)


def _in_division(request: PlanRequest, graph: Graph, timings: Timings, division: RowDivision) -> _Whole | None:
    """The best solution in one division of the rows; None: nothing fits. Raises :class:`TooSlowError`."""
    found, rest = _divided(request, graph, [division], timings)
    for failure in rest.failures:
        if isinstance(failure.error, TooSlowError):
            raise failure.error
    return found[0] if found else None


def _divided(
    request: PlanRequest, graph: Graph, tried: Sequence[RowDivision], timings: Timings
) -> tuple[list[_Whole], Tried]:
    """The best solution in each of some divisions of the rows, and why others have none."""
    found, rest, failures = list[_Whole](), Tried(), list[Failure]()
    for division in tried:
        inside = on_mesh(request, division)
        try:
            found.append(_Whole(inside, graph, *solve_mesh(inside, graph, timings), timings))
        except InfeasibleError as error:
            failures.append(Failure(error))
            rest += _excluded(inside, error, priced_baselines(inside, graph, timings))
    return found, replace(rest, failures=tuple(failures))


def _excluded(inside: PlanRequest, error: InfeasibleError, priced: Mapping[str, Predicted | None]) -> Tried:
    """Excludes plans without stages in a division of the rows, whose baselines are ``priced``."""
    is_proven = isinstance(error, TooSlowError) and error.is_proven
    proven = covered(inside, 1, 1, (1,)) if is_proven else frozenset[Division]()
    return Tried(excluded=(Excluded(NO_STAGES, error, priced, proven),))


def _figures(request: PlanRequest, solved: MeshSolution) -> tuple[str, Predicted]:
    # Listed beside other plans, whose peaks are compared with what the smallest device may hold.
    smallest = min(solved.step.rooms, key=lambda held: held.room.limit, default=None)
    memory = None if smallest is None else smallest.memory
    figures = predicted(solved.breakdown, solved.instance, request.cluster, memory)
    return f"no stages, {named_axes(request, solved.assignment, solved.instance.graph)}", figures
