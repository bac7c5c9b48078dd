"""Solves a plan again with one of its choices forbidden: what the choice is worth, all others free to follow.

``plan.why(name)`` says what each other choice would cost while its neighbours stay, which is quick, and often nothing
alone is possible. Here the whole program is solved anew, on the mesh and with the stages of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.ir.placements import NOT, short
from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.forbidden import Forbidden
from autopar.plans.views.why import Explanation

from .question import Question, question_of

_SEVERAL_AXES = (
    "not solved again: pins name placements on the axes of one mesh, and the stages of this plan have meshes of "
    "several axes each; ask for stages of as many devices each to compare"
)


def with_forbidden(plan: PlanRecord, explanation: Explanation) -> Explanation:
    """``explanation`` with its choice forbidden in the placement program. Unchanged where there is nothing to choose.

    Raises:
        OptionsError: the plan was not returned by :func:`autopar.plan` in this process, so its model is not known.
    """
    question = question_of(plan)
    node = _node_of(plan, explanation)
    if explanation.alternatives is None or node is None:
        return explanation
    place = _place(plan, node)
    alike = plan.alike[plan.nodes[node].tied or node]
    if not plan.stage_meshes.are_equal and len(plan.mesh) > 1:
        return replace(explanation, forbidden=Forbidden(place, len(alike), error=_SEVERAL_AXES))
    pins = {**question.options.pins, **{f"%{name}": f"{NOT}{place}" for name in alike}}
    try:
        other = question.again(mesh=_mesh_of(plan, question), options=_fixed(plan, question.options, pins))
    except AutoparError as error:
        return replace(explanation, forbidden=Forbidden(place, len(alike), error=str(error)))
    forbidden = Forbidden(
        choice=place,
        together=len(alike),
        instead=_place(other, node),
        seconds=other.predicted.step_seconds - plan.predicted.step_seconds,
        bytes=other.predicted.peak_bytes - plan.predicted.peak_bytes,
    )
    return replace(explanation, forbidden=forbidden)


def _node_of(plan: PlanRecord, explanation: Explanation) -> str | None:
    """The node whose choice is explained; None for a module without an output of its own."""
    if explanation.kind == "parameter":
        return plan.parameter_nodes.get(explanation.name)
    if explanation.kind == "module":
        return plan.module_nodes.get(explanation.name)
    return explanation.name


def _place(plan: PlanRecord, node: str) -> str:
    """What is forbidden: how a parameter's weight, or the first result of an operation, is placed."""
    if plan.nodes[node].op == "param":
        return short(plan.parameters[plan.nodes[node].target].weight)
    return short(plan.strategies[node].outputs[0])


def _mesh_of(plan: PlanRecord, question: Question) -> Any:
    """The mesh as the plan regrouped it, since pins read its axes; a mesh with names stays as it is."""
    if getattr(question.mesh, "mesh_dim_names", None):
        return question.mesh
    meshes = plan.stage_meshes
    return (plan.stages * plan.mesh[0], *plan.mesh[1:]) if meshes.are_equal else meshes.whole


def _fixed(plan: PlanRecord, options: Any, pins: Mapping[str, str]) -> Any:
    return replace(options, pins=pins, **dict(_stages(plan, options)))


def _stages(plan: PlanRecord, options: Any) -> Iterator[tuple[str, Any]]:
    """What the plan chose about stages and a user left open."""
    if plan.stages == plan.microbatches == 1:
        return
    meshes = plan.stage_meshes
    chosen = {"stages": plan.stages if meshes.are_equal else meshes.sizes, "microbatches": plan.microbatches}
    for name, value in chosen.items():
        if getattr(options, name) is None or (name == "stages" and not meshes.are_equal):
            yield name, value
