"""A plan as one self-contained page: no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from autopar.files import FileName, write_text
from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.memory_over_step import memory_over_step
from autopar.plans.views.module_tree import ModuleRow, module_rows
from autopar.plans.views.page_width import fixed_width
from autopar.plans.views.quantities import duration, share, signed_duration, size
from autopar.plans.views.stage_table import schedule_line
from autopar.plans.views.stages import busiest_stage, mesh_text, rows_text
from autopar.plans.views.step_timeline import step_timeline
from autopar.plans.views.summary import plan_text
from autopar.plans.views.table import plan_table
from autopar.plans.views.what_if import WhatIf

from .frontier_picture import frontier_sections
from .measured import read_measured
from .memory_picture import memory_picture
from .mesh_picture import mesh_pictures
from .rows import baseline_rows, parameter_rows, stage_table
from .timeline_picture import timeline_picture

if TYPE_CHECKING:  # Loaded where a page is made: most who look at a plan print it.
    from jinja2 import Environment

# The classes of colours in page.css, in the order in which parts of a bar take them.
_COLOURS = "abcdefg"
# Rows of a table of figures. Chosen: what a reader looks through; the method of the plan has all.
_MOST_ROWS = 60
# Height of the page inside a notebook's cell. Chosen: a screen.
_FRAME_PIXELS = 640


def write_html(
    plan: PlanRecord, path: FileName, record: FileName | None = None, whatif: WhatIf[Any] | None = None
) -> None:
    """``plan.to_html(path, record, whatif)``. Raises :class:`OptionsError` if a file cannot be written or read."""
    page = render(plan, record, whatif)
    write_text(path, page)


def embedded(plan: PlanRecord) -> str:
    """The page in a frame, so that a notebook's styles and the page's do not meet."""
    from markupsafe import Markup, escape

    frame = Markup('<iframe title="{}" srcdoc="{}" style="width:100%;height:{}px;border:0"></iframe>')
    return str(frame.format(f"Plan of {plan.model}", escape(render(plan)), _FRAME_PIXELS))


@cache
def environment() -> Environment:
    """The templates, and how quantities are written in them."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"duration": duration, "size": size, "signed": signed_duration, "part": _part}
    made.filters["percent"] = lambda percent: share(percent, 100)
    made.globals["css"] = lambda index: _COLOURS[index % len(_COLOURS)]
    return made


def render(plan: PlanRecord, record: FileName | None = None, whatif: WhatIf[Any] | None = None) -> str:
    """The page; ``record``: the JSON lines of a run of the plan; ``whatif``: the plan under other circumstances."""
    with fixed_width():
        return environment().get_template("plan.html.jinja").render(**_context(plan, record, whatif))


def _context(plan: PlanRecord, record: FileName | None, whatif: WhatIf[Any] | None) -> Mapping[str, Any]:
    rows = module_rows(plan)
    timeline, total = step_timeline(plan), plan.predicted.step_seconds * plan.stages
    measured = read_measured(plan, record) if record is not None else None
    stages, baselines = stage_table(plan) if plan.stages > 1 else [], baseline_rows(plan)
    return {
        "plan": plan,
        "contents": list(_contents(bool(measured), bool(stages), bool(whatif), bool(baselines))),
        "mesh": " · ".join(filter(None, (mesh_text(plan), rows_text(plan)))),
        "parts": _parts(plan),
        "timeline": timeline_picture(timeline),
        "measured": measured,
        "schedule": schedule_line(plan),
        "stages": stages,
        "memory": _memory(plan),
        "over": memory_picture(memory_over_step(plan, timeline), plan.memory_limit, plan.stages),
        "ways": mesh_pictures(plan),
        "rows": rows,
        "total": total,
        "held": sum(row.held * row.count for row in rows),
        "share": lambda row, times: share(row.seconds * row.count * times, total),
        "is_open": lambda row, times: _is_open(row, times, total),
        "parameters": parameter_rows(plan),
        "frontiers": list(frontier_sections(whatif)) if whatif is not None else [],
        "baselines": baselines,
        "tables": list(_tables(plan)),
        "text": plan_text(plan),
    }


def _contents(measured: bool, stages: bool, whatif: bool, baselines: bool) -> Iterator[tuple[str, str]]:
    yield "step", "One step"
    if measured:
        yield "measured", "Measured"
    if stages:
        yield "stages", "Stages"
    yield from (("memory", "Memory"), ("mesh", "Who holds what"), ("modules", "Modules"), ("parameters", "Parameters"))
    if whatif:
        yield "whatif", "What if"
    if baselines:
        yield "baselines", "Also priced"
    yield "tables", "Figures"


def _parts(plan: PlanRecord) -> list[tuple[str, float, float]]:
    """``(name, seconds, percent)`` of each part of a step; with stages, of the step of the busiest stage."""
    kinds = {
        "compute": "compute",
        "exchange": "exchange of rows",
        "reshard": "reshard",
        "gradient": "grad sync",
        "weight": "weight gather",
    }
    kinds |= {"optimizer": "optimizer", "refresh": "weight refresh", "offload": "state to the device and back"}
    kinds |= {"swap": "activations and weights to the host and back"}
    kinds |= {"hidden": "hidden by computing"}
    total = plan.predicted.step_seconds or 1.0
    busiest = busiest_stage(plan)
    sums = [
        (label, sum(line.seconds for line in plan.lines if line.kind == kind and line.stage == busiest))
        for kind, label in kinds.items()
    ]
    sums.append(("bubble", plan.predicted.bubble_seconds))
    sums.append(("quicker on cores that waiting ranks leave free", -plan.predicted.freed_seconds))
    return [(label, seconds, 100 * seconds / total) for label, seconds in sums if seconds]


def _memory(plan: PlanRecord) -> list[tuple[str, int, float]]:
    names = ("weight", "gradient", "optimizer", "activation", "temporary", "input")
    sizes = [(name, int(getattr(plan.predicted, f"{name}_bytes"))) for name in names]
    return [(name, count, 100 * count / max(plan.predicted.peak_bytes, 1)) for name, count in sizes if count]


def _is_open(row: ModuleRow, times: int, total: float) -> bool:
    # Chosen: at most five rows can be open.
    return row.seconds * row.count * times > 0.2 * total


def _part(amount: float, times: int, total: float) -> str:
    """The width of a bar in per cent."""
    return f"{100 * amount * times / total:.2f}" if total else "0"


def _tables(plan: PlanRecord) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[int], int]]:
    """``(by, head, rows, columns of figures, rows left out)`` of each table of figures."""
    for by in ("collective", "op", "kind"):
        table = plan_table(plan, by)
        head, rows, figures = table.texts()
        yield by, head, rows[:_MOST_ROWS], figures, max(0, len(rows) - _MOST_ROWS)
