"""A candidate that the search for a plan has solved, but not yet written as a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.placement.axis_names import default_names
from autopar.planner.axis_roles import role_names
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan

from .division_bounds import Division
from .stage_meshes import StageLayout


@dataclass(frozen=True)
class Candidate:
    """A solved candidate that takes ``seconds`` a step.

    ``make`` writes its plan; ``figures`` gives its name and predictions. Of the candidates of one ``layout`` (None:
    without stages) only the quickest is listed with the plan. ``baselines`` were priced with it. ``improved``, for
    pipelines, solves a schedule for it and returns the improved candidate. ``divisions``: those that its program
    covers, each with a lower bound of its seconds, 0 if none is known besides :mod:`.division_bounds`."""

    seconds: float
    layout: StageLayout | None
    make: Callable[[], Plan]
    figures: Callable[[], tuple[str, Predicted]]
    baselines: Mapping[str, Predicted | None] = field(default_factory=dict)
    improved: Callable[[], Candidate] | None = None
    divisions: Mapping[Division, float] = field(default_factory=dict)


def named_axes(request: PlanRequest, assignment: Assignment, graph: Graph) -> str:
    """The mesh as text: ``(dp=2, tp=2)``."""
    names = request.axis_names or role_names(request.roles, default_names(request.mesh, assignment, graph))
    return f"({', '.join(f'{name}={n}' for name, n in zip(names, request.mesh, strict=True))})"
