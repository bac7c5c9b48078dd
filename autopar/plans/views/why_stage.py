"""Explains why something is on its pipeline stage, and how its value is sent to other stages."""

from __future__ import annotations

import fnmatch
import re

from autopar.ir.placements import short
from autopar.ir.plan_record import PlanRecord

from .quantities import size
from .stages import ranks_of, stages_holding

_STAGE_PIN = re.compile(r"^\s*stage\s*[= ]\s*\d+\s*$")


def is_stage_pin(text: str) -> bool:
    """Whether a pin fixes a stage and not placements."""
    return _STAGE_PIN.match(text) is not None


def stage_reason(plan: PlanRecord, name: str, kind: str) -> str:
    """``1 (ranks 2-3): price: ...`` for a parameter, module or node; "" if no stage computes it."""
    stages = _stages(plan, name, kind)
    if not stages:
        return ""
    places = " and ".join(f"{s} (rank{_ranks(plan, s)})" for s in stages[:4])
    more = f" and {len(stages) - 4} more" if len(stages) > 4 else ""
    return f"{places}{more}, by {_chosen(plan, name, kind)}"


def _ranks(plan: PlanRecord, stage: int) -> str:
    first, last = ranks_of(plan, stage)
    return f"s {first}-{last}" if last > first else f" {first}"


def _stages(plan: PlanRecord, name: str, kind: str) -> tuple[int, ...]:
    if kind == "parameter":
        node = plan.parameter_nodes.get(name, "")
        updated = {line.stage for line in plan.lines_by_name.get(node, ()) if line.kind == "optimizer"}
        return tuple(sorted(updated)) or stages_holding(plan, {node})
    if kind == "module":
        lines = (line for line in plan.lines if line.module == name or line.module.startswith(f"{name}."))
        return tuple(sorted({line.stage for line in lines if line.kind == "compute"}))
    return stages_holding(plan, {name})


def _chosen(plan: PlanRecord, name: str, kind: str) -> str:
    """Who chose the stage, and why: the user, if a pin fixes the stage of the module that ``name`` is (in), or
    price."""
    path = name if kind != "node" else plan.nodes[name].target or plan.nodes[name].module
    parts = path.split(".")
    outer = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    for pattern, text in plan.pinned.items():
        if is_stage_pin(text) and any(fnmatch.fnmatchcase(module, pattern) for module in outer):
            return f"the user: pin {pattern!r}: {text!r}"
    return "price: of all cuts that fit into memory, those whose slowest part is quickest"


def sent_reasons(plan: PlanRecord, name: str) -> tuple[str, ...]:
    """A line for each chunk on another stage that receives the value of the node ``name``."""
    if plan.pipeline is None:
        return ()
    node = plan.parameter_nodes.get(name) or plan.module_nodes.get(name, name)
    placement = plan.pipeline.schedule.placement
    reasons = []
    for edge, place in sorted(plan.pipeline.wires.items()):
        source, target = placement[edge.source], placement[edge.target]
        if edge.name == node and source != target:
            count = plan.pipeline.wire_bytes[edge]
            reasons.append(
                f"from stage {source} to {target} as {short(place)}, {size(count)} x{plan.microbatches} by each rank: "
                "cheapest for sender, wire and receiver"
            )
    return tuple(reasons)
