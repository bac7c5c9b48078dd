"""A plan as one self-contained page: no scripts, no links, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from autopar.errors import OptionsError
from autopar.ir.placements import short
from autopar.ir.plan_record import PlanRecord

from .html_template import PAGE
from .module_tree import ModuleRow, module_rows
from .quantities import duration, share, signed_duration, size
from .stage_table import stage_lines
from .stages import busiest_stage, mesh_text
from .summary import compared, plan_text
from .table import plan_table
from .why import explain

# Lines of the table of stages. Chosen: a page can be scrolled, but a browser should open it at once.
MOST_STAGE_LINES = 400


def write_html(plan: PlanRecord, path: str | PathLike[str]) -> None:
    """``plan.to_html(path)``. Raises :class:`OptionsError` if the file cannot be written."""
    try:
        Path(path).write_text(render(plan), encoding="utf-8")
    except OSError as error:
        raise OptionsError(f"cannot write {fspath(path)!r}: {error.strerror}") from error


def render(plan: PlanRecord) -> str:
    """The page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": duration, "size": size, "signed": signed_duration}
    return environment.from_string(PAGE).render(
        plan=plan,
        mesh=mesh_text(plan),
        stages=stage_lines(plan, MOST_STAGE_LINES) if plan.stages > 1 else [],
        parts=_parts(plan),
        memory=_memory(plan),
        rows=module_rows(plan),
        share=lambda row, times: share(row.seconds * row.count * times, _time(plan)),
        is_open=lambda row, times: _is_open(plan, row, times),
        parameters=_parameters(plan),
        baselines=[(name, " ".join(compared(plan, other).split())) for name, other in plan.baselines.items()],
        tables=[(by, plan_table(plan, by)) for by in ("collective", "op", "kind")],
        text=plan_text(plan),
    )


def _parts(plan: PlanRecord) -> list[tuple[str, float, float]]:
    """``(name, seconds, percent)`` of each part of a step; with stages, of the step of the busiest stage."""
    kinds = {"compute": "compute", "optimizer": "optimizer", "reshard": "reshard", "weight": "weight gather"}
    kinds |= {"gradient": "grad sync", "refresh": "weight refresh", "hidden": "hidden by computing"}
    kinds |= {"offload": "state to and from the host"}
    total = plan.predicted.step_seconds or 1.0
    busiest = busiest_stage(plan)
    sums = [
        (label, sum(line.seconds for line in plan.lines if line.kind == kind and line.stage == busiest))
        for kind, label in kinds.items()
    ]
    sums.append(("bubble", plan.predicted.bubble_seconds))
    sums.append(("processors of waiting ranks", -plan.predicted.freed_seconds))
    return [(label, seconds, 100 * seconds / total) for label, seconds in sums if seconds]


def _memory(plan: PlanRecord) -> list[tuple[str, int, float]]:
    names = ("weight", "gradient", "optimizer", "activation", "temporary", "input")
    sizes = [(name, int(getattr(plan.predicted, f"{name}_bytes"))) for name in names]
    return [(name, count, 100 * count / max(plan.predicted.peak_bytes, 1)) for name, count in sizes if count]


def _is_open(plan: PlanRecord, row: ModuleRow, times: int) -> bool:
    # Chosen: at most five rows can be open.
    return row.seconds * row.count * times > 0.2 * _time(plan)


def _time(plan: PlanRecord) -> float:
    """Seconds of a step summed over all stages, the total to which shares of modules refer."""
    return plan.predicted.step_seconds * plan.stages


def _parameters(plan: PlanRecord) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for path, place in plan.parameters.items():
        why = explain(plan, path)
        rows.append(
            {
                "path": path,
                "type": why.about,
                "weight": short(place.weight),
                "gradient": short(place.gradient),
                "optimizer": short(place.optimizer),
                "reason": why.reason,
                "others": why.alternatives.cheapest if why.alternatives is not None else (),
            }
        )
    return rows
