"""Tables of a plan: the step summed by module, kind of line, operation, origin of its rule, phase, collective or
stage; and the divisions of the devices that the search looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.errors import OptionsError
from autopar.ir.module_paths import fold_path
from autopar.ir.plan_record import PlanLine, PlanRecord, Predicted
from autopar.ir.searched import TriedDivision

from .columns import columns
from .quantities import duration, longer, share, size
from .stages import folded_modules, stage_rows

Cell = str | int | float


@dataclass(frozen=True)
class PlanTable:
    """The result of :meth:`autopar.plans.plan.Plan.table`: ``rows`` of ``columns``, the most expensive first; ``str``
    prints it with units. Columns called ``seconds`` are in seconds, ``bytes`` in bytes. ``step_seconds`` is the total
    to which shares refer: the step, multiplied by the number of stages if the rows sum over them. What computing hides
    has a negative share, so that all add up to the step (without its bubble); hidden and not, a kind of communication
    may take longer than it. A stage whose ranks compute quicker while others wait, on cores that they share, may be
    busy for longer, too, and idles for less than nothing. Divisions are compared with the plan; where no seconds are
    known, that cell is "", and the row last.
    """

    by: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    step_seconds: float

    def texts(self) -> tuple[list[str], list[list[str]], list[int]]:
        """The head, the rows and which columns are figures, with units and shares of the step."""
        shown = {"seconds": "time", "communicated": "sent", "held": "memory"}
        header = [shown.get(name, name) for name in self.columns]
        places = [i for i, name in enumerate(self.columns) if name in ("count", *_TIMES, *_SIZES)]
        rows = [[_text(name, cell) for name, cell in zip(self.columns, row, strict=True)] for row in self.rows]
        if "seconds" in self.columns:
            at, beside = self.columns.index("seconds"), self.by == "division"
            header.append("than the plan" if beside else "share")
            for row, raw in zip(rows, self.rows, strict=True):
                row.append(_compared(raw[at], self.step_seconds, beside))
            places.append(len(header) - 1)
        return header, rows, places

    def __str__(self) -> str:
        header, rows, places = self.texts()
        return "\n".join(columns(header, rows, right=places)) if rows else f"nothing by {self.by}"


def _compared(seconds: Cell, step: float, beside: bool) -> str:
    """Seconds of a row beside those of the plan, or as a share of the step."""
    if isinstance(seconds, str):  # They are not known.
        return ""
    return longer(seconds, step) if beside else share(seconds, step)


_TIMES = ("seconds", "compute", "comm", "idle")
_SIZES = ("bytes", "communicated", "held")


def _text(name: str, cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if name in _TIMES:
        return duration(cell) if cell else ""
    if name in _SIZES:
        return size(cell) if cell else ""
    return f"{cell:g}" if cell else ""


def plan_table(plan: PlanRecord, by: str) -> PlanTable:
    """``plan.table(by)``. Raises :class:`OptionsError` for an unknown ``by``."""
    if by not in _TABLES:
        instead = "; plan.tree() shows the modules as a tree" if by in ("tree", "modules") else ""
        raise OptionsError(f"a plan has no table by {by!r}; one of {', '.join(map(repr, _TABLES))}{instead}")
    names, rows = _TABLES[by](plan)
    at = names.index("seconds")
    sign = 1.0 if by == "division" else -1.0
    ordered = sorted(rows, key=lambda row: (row[at] == "", sign * float(row[at] or 0.0), str(row[0])))
    stages = 1 if by in ("stage", "division") else plan.stages
    return PlanTable(by, names, tuple(ordered), plan.predicted.step_seconds * stages)


_Rows = tuple[tuple[str, ...], list[tuple[Cell, ...]]]


def _by_module(plan: PlanRecord) -> _Rows:
    """The table by module: seconds, bytes sent and bytes at rest. Equal layers share a row."""
    lines: dict[str, list[PlanLine]] = {}
    held: dict[str, int] = {}
    layers = {
        fold_path(line.module)[0].rpartition(".*.")[0] for line in plan.lines if ".*." in fold_path(line.module)[0]
    }

    def pattern(path: str) -> str:
        """The row of a module: ``h.*.mlp`` for ``h.3.mlp``, and ``h.*`` for the layer ``h.3`` itself."""
        folded = fold_path(path)[0]
        stem, _, name = folded.rpartition(".")
        return f"{stem}.*" if name.isdigit() and stem in layers else folded

    for line in plan.lines:
        lines.setdefault(pattern(line.module), []).append(line)
    for holding in plan.holdings:
        path = pattern(holding.module)
        held[path] = held.get(path, 0) + holding.bytes
    rows: list[tuple[Cell, ...]] = []
    for path in dict.fromkeys([*lines, *held]):
        own = lines.get(path, [])
        compute = sum(line.seconds for line in own if line.kind in ("compute", "optimizer"))
        seconds = sum(line.seconds for line in own)
        rows.append((path or "(model)", compute, seconds - compute, seconds, _sent(own), held.get(path, 0)))
    return ("module", "compute", "comm", "seconds", "communicated", "held"), rows


def _sent(lines: list[PlanLine]) -> int:
    return sum(step.bytes * line.times for line in lines for step in line.steps)


def _by(name: str, key: Callable[[PlanRecord, PlanLine], str]) -> Callable[[PlanRecord], _Rows]:
    def make(plan: PlanRecord) -> _Rows:
        groups: dict[str, list[PlanLine]] = {}
        for line in plan.lines:
            groups.setdefault(key(plan, line), []).append(line)
        rows: list[tuple[Cell, ...]] = [
            (text, sum(line.times for line in lines), sum(line.seconds for line in lines), _sent(lines))
            for text, lines in groups.items()
        ]
        return (name, "count", "seconds", "communicated"), rows

    return make


def _op(plan: PlanRecord, line: PlanLine) -> str:
    if line.kind != "compute":
        return f"({line.kind})"
    return plan.nodes[line.name].op if line.name in plan.nodes else "?"


def _rule(plan: PlanRecord, line: PlanLine) -> str:
    """The source of the operation's sharding rule."""
    return plan.rules.get(_op(plan, line), _op(plan, line))


def _by_collective(plan: PlanRecord) -> _Rows:
    """The table by collective. A line of several hops has one price, whose seconds are shared among its collectives in
    proportion to their bytes. Weights that are gathered together are one collective.
    """
    groups: dict[tuple[str, str, int, str], list[tuple[int, float]]] = {}
    for lines in plan.sent_together:
        for members in zip(*(_collectives(plan, line) for line in lines), strict=True):
            kind, axes = members[0][:2]
            count, seconds = sum(each[2] for each in members), sum(each[3] for each in members)
            groups.setdefault((kind, axes, count, lines[0].kind), []).append((lines[0].times, seconds))
    rows: list[tuple[Cell, ...]] = [
        (kind, axes, reason, sum(times for times, _ in lines), count, sum(seconds for _, seconds in lines))
        for (kind, axes, count, reason), lines in groups.items()
    ]
    return ("collective", "axes", "for", "count", "bytes", "seconds"), rows


def _collectives(plan: PlanRecord, line: PlanLine) -> Iterator[tuple[str, str, int, float]]:
    """The (kind, axes, bytes, seconds) of each collective of a line."""
    total = sum(step.bytes for step in line.steps)
    for step in line.steps:
        if step.communicates:
            axes = ",".join(plan.axis_names[axis] for axis in step.axes)
            yield step.kind, axes, step.bytes, line.seconds * step.bytes / total


def _by_stage(plan: PlanRecord) -> _Rows:
    """The table by pipeline stage: seconds in a step, busy and idle. ``communicated``: bytes that each of its devices
    sends to other stages."""
    rows: list[tuple[Cell, ...]] = []
    for row in stage_rows(plan):
        sent = sum(message.bytes for message in row.sent) * plan.microbatches
        idle = plan.predicted.step_seconds - row.busy
        held = " | ".join(map(folded_modules, row.modules))
        ranks = f"{row.ranks[0]}-{row.ranks[1]}"
        rows.append((str(row.stage), ranks, held, row.compute, row.comm, idle, row.busy, sent, row.peak))
    return ("stage", "ranks", "holds", "compute", "comm", "idle", "seconds", "communicated", "held"), rows


def _by_division(plan: PlanRecord) -> _Rows:
    """The divisions of the devices, with the seconds of a step: of what was solved or only estimated, whether or not it
    fits, and the bounds of the rest, below which no step of it is. ``count`` adds up to ``plan.searched.divisions``:
    one program solves several divisions, and what is only estimated counts in the rows of bounds. Where everything was
    solved that could win, the plan and what is listed beside it. Kinds of which there is no plan come last, with why
    (``plan.excluded``); their seconds are not known."""
    found, step = plan.searched, plan.predicted.step_seconds
    if found is None:
        rows: list[tuple[Cell, ...]] = [("the plan", "solved", step), *_beside(plan)]
        return ("division", "known", "seconds"), rows + [(name, why, "") for name, why in plan.excluded.items()]
    rows = [(each.described, each.divisions, _known(plan, each), each.seconds) for each in found.tried]
    if found.first:
        more = f" and {found.left - 1} others" if found.left > 1 else ""
        rows.append((f"{found.first}{more}", found.left, "at least", found.first_bound))
    if found.excluded:
        rows.append((f"{found.excluded} others, excluded by their bounds", found.excluded, "at least", step))
    # A kind of plans may be called by its layout, too, under which its estimate is listed.
    listed = {each.described for each in found.tried}
    left_out = ((name, why) for name, why in plan.excluded.items() if listed.isdisjoint((name, *name.split(": ")[1:])))
    rows += [(name, 0, why, "") for name, why in left_out]
    return ("division", "count", "known", "seconds"), rows


def _beside(plan: PlanRecord) -> Iterator[tuple[Cell, ...]]:
    """The plans that are listed beside a plan, and those that are not possible."""
    for name, other in plan.baselines.items():
        if other is not None:
            yield name, _fits("solved", plan, other), other.step_seconds
        elif name not in plan.excluded:
            yield name, "not possible", ""


def _known(plan: PlanRecord, tried: TriedDivision) -> str:
    other = plan.baselines.get(tried.described)
    return tried.how if other is None else _fits(tried.how, plan, other)


def _fits(known: str, plan: PlanRecord, other: Predicted) -> str:
    return known if other.peak_bytes <= plan.least_limit else f"{known}, does not fit"


_TABLES: dict[str, Callable[[PlanRecord], _Rows]] = {
    "module": _by_module,
    "kind": _by("kind", lambda plan, line: line.kind),
    "op": _by("op", _op),
    "rule": _by("rule", _rule),
    "phase": _by("phase", lambda plan, line: line.phase),
    "collective": _by_collective,
    "stage": _by_stage,
    "division": _by_division,
}
