"""The differences between two plans: placements by path, seconds, bytes and baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.module_paths import fold_path
from autopar.ir.placements import Placements, short
from autopar.ir.plan_record import PlanRecord, Predicted

from .columns import columns
from .module_tree import optimizer_text
from .other_axes import is_alike, runs_alike
from .quantities import duration, signed_duration, signed_size, size
from .stages import mesh_text

# Rows of the table of changed placements. Chosen: about a screen.
SHOWN = 60
ABSENT = "-"
_FIGURES = (
    ("step", "step_seconds"),
    ("compute", "compute_seconds"),
    ("communication", "comm_seconds"),
    ("bubble", "bubble_seconds"),
    ("quicker on cores that waiting ranks leave free", "freed_seconds"),
    ("peak", "peak_bytes"),
    ("weights", "weight_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activation_bytes"),
    ("temporary", "temporary_bytes"),
    ("inputs", "input_bytes"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One path placed differently. ``what`` is weight, gradient, optimizer, output, sent (from chunk to chunk) or a
    setting. ``before`` or ``after`` is ``-`` where a plan has none.
    """

    path: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure of both plans, in seconds or, for names of memory, bytes."""

    name: str
    before: float
    after: float
    is_bytes: bool


@dataclass(frozen=True)
class Difference:
    """The result of :meth:`autopar.plans.plan.Plan.diff`: the changes from this plan (``before``) to the other
    (``after``); ``str`` is a table.

    ``operations`` counts the nodes that run by another strategy. ``figures`` are those that differ. ``baselines``
    compares the step seconds of the baselines that either plan lists (None: not listed, or not possible). Where the
    meshes have different numbers of axes, ``other_axes`` counts the placements that differ in that alone, such as (R)
    and (R,R): they are not among ``placements``, nor do such operations count.
    """

    settings: tuple[Change, ...]
    placements: tuple[Change, ...]
    operations: int
    figures: tuple[FigureChange, ...]
    baselines: Mapping[str, tuple[float | None, float | None]]
    other_axes: int = 0

    @property
    def same(self) -> bool:
        """Whether both plans make the same choices, whatever they predict."""
        return not (self.settings or self.placements or self.operations)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.same:
            yield "both plans choose the same"
        if self.settings:
            yield from columns(("setting", "before", "after"), [(c.path, c.before, c.after) for c in self.settings])
        yield from self._placement_lines()
        if self.other_axes:
            yield f"{self.other_axes} placements differ in the number of axes alone, such as (R) and (R,R)"
        if self.operations:
            yield f"{self.operations} operation{'s run' if self.operations > 1 else ' runs'} otherwise"
        if self.figures:
            figures = [_figure_row(figure) for figure in self.figures]
            yield from columns(("predicted", "before", "after", "change"), figures, right=(1, 2, 3))
        rows = [(name, _seconds(a), _seconds(b)) for name, (a, b) in self.baselines.items() if a != b]
        if rows:
            yield from columns(("also priced", "before", "after"), rows, right=(1, 2))

    def _placement_lines(self) -> Iterator[str]:
        folded: dict[tuple[str, str, str, str], list[str]] = {}
        for c in self.placements:
            folded.setdefault((fold_path(c.path)[0], c.what, c.before, c.after), []).append(c.path)
        rows = [
            (paths[0] if len(paths) == 1 else f"{pattern}  x{len(paths)}", what, before, after)
            for (pattern, what, before, after), paths in folded.items()
        ]
        if rows:
            yield from columns(("placement", "of", "before", "after"), rows[:SHOWN])
        if len(rows) > SHOWN:
            yield f"… {len(rows) - SHOWN} more"


def _figure_row(figure: FigureChange) -> tuple[str, str, str, str]:
    show: Callable[[float], str] = size if figure.is_bytes else duration
    change = figure.after - figure.before
    text = signed_size(change) if figure.is_bytes else signed_duration(change)
    relative = f" ({change / figure.before:+.1%})" if figure.before else ""
    return figure.name, show(figure.before), show(figure.after), text + relative


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else duration(value)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A change of placement; ``old`` and ``new`` are the placements, if both plans have it and nothing else of it
    changed."""

    change: Change
    old: Placements | None = None
    new: Placements | None = None

    def is_alike(self, before: PlanRecord, after: PlanRecord) -> bool:
        """Whether it differs in the number of axes alone."""
        return self.old is not None and self.new is not None and is_alike(self.old, self.new, before.mesh, after.mesh)


def difference(before: PlanRecord, after: PlanRecord) -> Difference:
    """``before.diff(after)``."""
    shared = before.strategies.keys() | after.strategies.keys()
    names = (*before.baselines, *(name for name in after.baselines if name not in before.baselines))
    placed = [*_placements(before, after), *_wires(before, after)]
    changed = tuple(each.change for each in placed if not each.is_alike(before, after))
    runs = ((before.strategies.get(name), after.strategies.get(name)) for name in shared)
    return Difference(
        settings=tuple(_settings(before, after)),
        placements=changed,
        operations=sum(not runs_alike(*pair, before.mesh, after.mesh) for pair in runs),
        figures=tuple(_figures(before.predicted, after.predicted)),
        baselines={name: (_step(before, name), _step(after, name)) for name in names},
        other_axes=len(placed) - len(changed),
    )


def _step(plan: PlanRecord, name: str) -> float | None:
    baseline = plan.baselines.get(name)
    return None if baseline is None else baseline.step_seconds


def _settings(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    for name in (
        "model",
        "batch",
        "mesh",
        "cluster",
        "memory_limit",
        "stages",
        "schedule",
        "microbatches",
        "precision",
        "layout",
        "optimizer",
        "compile",
        "imbalance",
    ):
        first, second = (getattr(plan, name) for plan in (before, after))
        if name == "mesh":  # The names of axes are derived from the placements. They are not a setting of their own.
            if before.stage_meshes != after.stage_meshes:
                yield Change(name, "setting", _mesh(before), _mesh(after))
        elif first != second:
            yield Change(name, "setting", _setting(name, first), _setting(name, second))
    exchanges = ["every-step" if p.sync is None else f"{p.sync.replicas} x {p.sync.method}" for p in (before, after)]
    if exchanges[0] != exchanges[1]:
        yield Change("sync", "setting", *exchanges)
    yield from _pipeline_settings(before, after)
    for pattern in dict.fromkeys([*before.pinned, *after.pinned]):
        first, second = before.pinned.get(pattern, ABSENT), after.pinned.get(pattern, ABSENT)
        if first != second:
            yield Change(f"pin {pattern}", "setting", first, second)


def _mesh(plan: PlanRecord) -> str:
    return f"({mesh_text(plan)})" if plan.stages > 1 or math.prod(plan.mesh) > 1 else "1 device"


def _pipeline_settings(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    """Whose statistics are used, chunks per stage and the places of cuts."""
    pipelines = before.pipeline, after.pipeline
    statistics = ["microbatch" if p is not None and p.own_statistics else "batch" for p in pipelines]
    if statistics[0] != statistics[1]:
        yield Change("batch_statistics", "setting", *statistics)
    chunks = [str(p.chunks_per_stage) if p is not None else "1" for p in pipelines]
    if chunks[0] != chunks[1]:
        yield Change("chunks per stage", "setting", *chunks)
    cuts = [p.cuts if p is not None else () for p in pipelines]
    if cuts[0] != cuts[1]:
        yield Change("cuts", "setting", _cuts(before), _cuts(after))


def _cuts(plan: PlanRecord) -> str:
    """Where chunks begin."""
    cuts = plan.pipeline.cuts if plan.pipeline is not None else ()
    return ", ".join(_described(plan, name) for name in cuts) or ABSENT


def _described(plan: PlanRecord, name: str) -> str:
    """A node by its module and operation, and which of several it is, since the name is the graph's own; that if there
    is no module."""
    node = plan.nodes.get(name)
    if node is None or not node.module:
        return name
    alike = [own for own, other in plan.nodes.items() if (other.module, other.op) == (node.module, node.op)]
    which = f" #{alike.index(name) + 1}" if len(alike) > 1 else ""
    return f"{node.module} ({node.op}{which})"


def _setting(name: str, value: object) -> str:
    return size(value) if name == "memory_limit" and isinstance(value, int) else str(value) or ABSENT


def _placements(before: PlanRecord, after: PlanRecord) -> Iterator[_Placed]:
    for path in dict.fromkeys([*before.parameters, *after.parameters]):
        first, second = before.parameters.get(path), after.parameters.get(path)
        for (what, was, old), (_, now, new) in zip(_parts(first), _parts(second), strict=True):
            is_moved = what == "optimizer" and first and second and first.offload != second.offload
            if was != now:
                yield _Placed(Change(path, what, was, now), *((None, None) if is_moved else (old, new)))
    for path in dict.fromkeys([*before.outputs, *after.outputs]):
        yield from _if_changed(path, "output", before.outputs.get(path), after.outputs.get(path))


def _parts(place: ParameterPlacement | None) -> Iterator[tuple[str, str, Placements | None]]:
    """How a parameter's parts are placed, in words and as placements; what of a plan without it."""
    if place is None:
        yield from ((what, ABSENT, None) for what in ("weight", "gradient", "optimizer"))
    else:
        yield "weight", short(place.weight), place.weight
        yield "gradient", short(place.gradient), place.gradient
        yield "optimizer", optimizer_text(place), place.optimizer


def _if_changed(path: str, what: str, old: Placements | None, new: Placements | None) -> Iterator[_Placed]:
    was, now = (ABSENT if place is None else short(place) for place in (old, new))
    if was != now:
        yield _Placed(Change(path, what, was, now), old, new)


def _wires(before: PlanRecord, after: PlanRecord) -> Iterator[_Placed]:
    """Values that are sent between different chunks, or in a different placement."""
    first, second = (plan.pipeline.wires if plan.pipeline is not None else {} for plan in (before, after))
    for edge in sorted(first.keys() | second.keys()):
        sent = _described(before if edge in first else after, edge.name)
        yield from _if_changed(sent, f"sent {edge.source} to {edge.target}", first.get(edge), second.get(edge))


def _figures(before: Predicted, after: Predicted) -> Iterator[FigureChange]:
    for name, attribute in _FIGURES:
        first, second = getattr(before, attribute), getattr(after, attribute)
        if first != second:
            yield FigureChange(name, first, second, attribute.endswith("_bytes"))
