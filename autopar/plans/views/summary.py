"""The text of a plan: at most 40 lines of 100 columns (fewer if the terminal is narrower) for any model. Identical
layers are folded; communication has lines of its own.

Rows are opened where most time is spent: as long as lines are left, the most expensive row that hides something is
opened.
"""

from __future__ import annotations

import heapq
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.node import RECOMPUTED
from autopar.ir.placements import shard_before
from autopar.ir.plan_record import PlanRecord
from autopar.ir.planned_sync import PlannedSync

from .also_priced import also_priced
from .coverage import coverage
from .idle_axes import legend
from .module_tree import ModuleRow, Move, module_rows, moves_of
from .page_width import page_width
from .quantities import clip, duration, share, size, trim
from .stage_table import stage_lines
from .stages import busiest_stage, device_memory_text, fullest_stage, mesh_text, rows_text

# Lines of a plan in print. Chosen: about a screen.
LINES = 40
# Characters of a column of figures: `123.4 ms` and its head fit.
FIGURES = 10
# Moves that a row lists. Chosen: what a reader takes in.
MOST_MOVES = 4
# Communication matters most in a plan: rows that communicate are opened before rows that only compute.
# Chosen: a tenth of a row's seconds in communication counts like the rest.
COMM_WEIGHT = 10
# Warnings that are listed. Chosen: what a reader takes in; the others are in plan.warnings.
MOST_WARNINGS = 3


def plan_text(plan: PlanRecord) -> str:
    """``str(plan)``."""
    head, foot = list(_head(plan)), list(_foot(plan))
    left = LINES - len(head) - len(foot)
    stages = [*stage_lines(plan, max(4, (left - 1) // 2)), ""] if plan.stages > 1 else []
    table = list(_table(plan, left - len(stages)))
    return "\n".join(line.rstrip() for line in (*head, *stages, *table, *foot))


def plan_in_short(plan: PlanRecord) -> str:
    """``repr(plan)``, for prompts, debuggers and messages: of what, on what mesh, and how long a step takes."""
    return f"<Plan of {plan.model} on ({mesh_text(plan)}): {duration(plan.predicted.step_seconds)} a step>"


def _head(plan: PlanRecord) -> Iterator[str]:
    names = mesh_text(plan)
    policy = "" if plan.precision == "fp32" else f", {plan.precision}"
    yield f"Plan   {trim(plan.model, page_width() - 7 - len(policy))}{policy}"
    reading = f"placements read ({', '.join(plan.axis_names)}): S(d) shard dim d · R replicate · P partial"
    if plan.stages > 1 and math.prod(plan.stage_meshes.largest) == 1:
        reading = "each stage on one device: nothing is sharded"
    lines = [f"mesh   ({names})   {reading}"]
    if len(lines[0]) > page_width():
        lines = [f"mesh   ({names})", f"       {reading}"]
    if any(shard_before(place) > 1 for places in plan.placements.values() for place in places):
        lines.append("       S(d/n) shard of each of n blocks of dim d")
    if idle := legend([names, *plan.baselines]):
        lines.append(f"       {idle}")
    yield from (clip(line, page_width()) for line in lines)
    if any(plan.shares):
        differ = "speed and memory" if plan.device_limits else "speed"
        yield clip(f"rows   {rows_text(plan)}, since devices differ in {differ}", page_width())
    if plan.device_limits:
        yield clip(f"memory {device_memory_text(plan)}", page_width())
    yield from _status(plan)
    if plan.searched is not None:
        yield from _sentence(coverage(plan.searched, plan.predicted.step_seconds))
    yield from _sentence(f"prices {plan.cluster}: {plan.cluster_source}".rstrip(": "))
    if plan.layout:
        yield from _sentence(f"layout {plan.layout} (given; the rest is searched)")
    if plan.sync is not None:
        yield from _replicas(plan.sync)
    if plan.pipeline is not None and plan.pipeline.own_statistics:
        yield "batch statistics are those of each microbatch, as in a loop that accumulates gradients"
    yield ""


def _status(plan: PlanRecord) -> Iterator[str]:
    """How good the plan is proven to be, its step and its peak. Of several stages the placements are proven alone:
    their program sums the work of all stages, and knows neither cuts nor schedule."""
    p = plan.predicted
    status = plan.status.upper() + (f" within {plan.gap:.2%}" if math.isfinite(plan.gap) else ", no bound proven")
    status = f"placements {status}" if plan.stages > 1 else status
    step = f"predicted step {duration(p.step_seconds)}"
    peak = f"peak {size(p.peak_bytes)} of {size(plan.memory_limit)} per rank"
    figures = f"status {status}   {step}   {peak}"
    yield from [figures] if len(figures) <= page_width() else [f"status {status}", f"       {step}   {peak}"]


def _sentence(text: str) -> list[str]:
    """A line of the head, continued below its text where it is wider than the page."""
    return textwrap.wrap(text, page_width(), subsequent_indent=" " * 7, break_on_hyphens=False)


def _replicas(sync: PlannedSync) -> Iterator[str]:
    """The lines for the exchange between replicas."""
    yield from _sentence(f"sync   {sync.replicas} replicas of this plan, {sync.method}")
    beside = " beside the step" if sync.hidden else ""
    sent = f"{size(sync.bytes)} per rank in {sync.every} steps: {size(sync.bytes_per_step)} a step"
    saved = f"gradients at every step: {duration(sync.gradient_seconds)}"
    yield from _sentence(f"       {sent}, {duration(sync.seconds_per_step)} a step{beside} ({saved})")


def _table(plan: PlanRecord, budget: int) -> Iterator[str]:
    ranks = math.prod(plan.mesh)
    named = f"ranks 0-{ranks - 1}" if ranks > 1 else "rank 0"
    microbatches = f"{plan.microbatches} microbatches" if plan.microbatches > 1 else "1 microbatch"
    if plan.pipeline is not None:
        microbatches = f"a whole step of {microbatches}"
    what = f"stage 0 · {named} · {microbatches}"
    if plan.stages > 1:
        what = f"modules of all stages · {microbatches}"
    yield f"{what:<{page_width() - 21}}{'forward + backward':>21}"
    rows = module_rows(plan)
    widths = _widths(rows)
    yield _line(widths, "module", "weight", "output", "compute", "comm")
    body = _Body(rows, budget - 2, widths)
    yield from (body if body.is_whole else _Body(_joined(rows, widths.name), budget - 2, widths)).lines()


@dataclass(frozen=True)
class _Widths:
    name: int
    weight: int
    output: int


def _widths(rows: Sequence[ModuleRow]) -> _Widths:
    every = list(_all_rows(rows))
    weight = min(18, max([14, *(len(row.weight) for row in every)]))
    output = min(22, max([16, *(len(row.output) for row in every)]))
    return _Widths(page_width() - weight - output - 2 * FIGURES - 4, weight, output)


def _all_rows(rows: Sequence[ModuleRow]) -> Iterator[ModuleRow]:
    for row in rows:
        yield row
        yield from _all_rows(row.children)


def _line(widths: _Widths, name: str, weight: str, output: str, compute: str, comm: str) -> str:
    return (
        f"{clip(name, widths.name):<{widths.name}} {clip(weight, widths.weight):<{widths.weight}} "
        f"{clip(output, widths.output):<{widths.output}} {compute:>{FIGURES}} {comm:>{FIGURES}}"
    )


class _Body:
    """Chooses which rows to open within ``budget`` lines. Used while one plan is printed."""

    def __init__(self, rows: tuple[ModuleRow, ...], budget: int, widths: _Widths) -> None:
        self.widths, self.budget = widths, max(budget, 1)
        self.root = ModuleRow("", ("",), children=tuple(rows))
        # For each open row, how many of its children are shown.
        self.open: dict[int, int] = {}
        self.order = itertools.count()
        self._choose()

    @property
    def is_whole(self) -> bool:
        """Whether no row is left out."""
        hiding = (row for row in (self.root, *_all_rows(self.root.children)) if row.children or row.moves)
        return all(self.open.get(id(row)) == len(row.children) for row in hiding)

    def _choose(self) -> None:
        left = self.budget - self._open(self.root, self.budget)
        queue: list[tuple[float, int, float, ModuleRow]] = []
        self._enqueue(queue, self.root, 1)
        while queue and left > 0:
            _, _, times, row = heapq.heappop(queue)
            taken = self._open(row, left)
            left -= taken
            if taken:
                self._enqueue(queue, row, times)

    def _enqueue(self, queue: list[tuple[float, int, float, ModuleRow]], row: ModuleRow, times: float) -> None:
        for child in self._shown(row):
            if child.moves or child.children:
                interest = (child.compute + COMM_WEIGHT * child.comm) * child.count * times
                heapq.heappush(queue, (-interest, next(self.order), times * child.count, child))

    def _open(self, row: ModuleRow, left: int) -> int:
        """Opens ``row`` if that takes at most ``left`` lines; returns how many it takes. If it has too many children,
        it shows the most expensive ones, provided that a few fit, and leaves some lines for their contents.
        """
        moves, children = min(len(row.moves), MOST_MOVES), len(row.children)
        shown = children if moves + children <= left else (left - moves - 1) * 3 // 4
        if shown < min(children, 3):
            return 0
        self.open[id(row)] = shown
        return moves + shown + (shown < children)

    def _shown(self, row: ModuleRow) -> list[ModuleRow]:
        """The children that an open row shows, in their order."""
        by_cost = sorted(row.children, key=lambda child: -child.seconds * child.count)
        shown = set(map(id, by_cost[: self.open.get(id(row), 0)]))
        return [child for child in row.children if id(child) in shown]

    def lines(self) -> Iterator[str]:
        yield from self._below(self.root, 0)

    def _below(self, row: ModuleRow, depth: int) -> Iterator[str]:
        if id(row) not in self.open:
            return
        yield from self._move_lines(row, depth)
        shown = self._shown(row)
        for child in shown:
            yield self._row_line(child, depth)
            yield from self._below(child, depth + 1)
        shown_ids = set(map(id, shown))
        hidden = [child for child in row.children if id(child) not in shown_ids]
        if hidden:
            count = sum(child.count for child in hidden)
            compute = sum(child.compute * child.count for child in hidden)
            comm = sum(child.comm * child.count for child in hidden)
            label = f"{'  ' * depth}… {count} more module{'s' if count > 1 else ''}"
            yield _line(self.widths, label, "", "", _figure(compute), _figure(comm))

    def _row_line(self, row: ModuleRow, depth: int) -> str:
        each = f"  x{row.count}, each:" if row.count > 1 else ""
        room = self.widths.name - 2 * depth - len(each)
        label = f"{'  ' * depth}{clip(row.label, room)}{each}"
        return _line(self.widths, label, row.weight, row.output, _figure(row.compute), _figure(row.comm))

    def _move_lines(self, row: ModuleRow, depth: int) -> Iterator[str]:
        shown = row.moves if len(row.moves) <= MOST_MOVES else row.moves[: MOST_MOVES - 1]
        for move in shown:
            yield _move_line(f"{'  ' * depth}↳ {_move_text(move)}", move.seconds)
        if len(shown) < len(row.moves):
            hidden = row.moves[len(shown) :]
            count = sum(move.count for move in hidden)
            yield _move_line(f"{'  ' * depth}↳ {count:g} more reshards", sum(move.seconds for move in hidden))


def _move_line(text: str, seconds: float) -> str:
    room = page_width() - FIGURES - 1
    return f"{clip(text, room):<{room}} {_figure(seconds):>{FIGURES}}"


def _move_text(move: Move) -> str:
    what = f"{move.what}  {move.way}  "
    return what + (f"{size(move.bytes)} x{move.count:.3g}" if move.bytes else f"local x{move.count:.3g}")


def _figure(seconds: float) -> str:
    return duration(seconds) if seconds else ""


def _joined(rows: tuple[ModuleRow, ...], width: int) -> tuple[ModuleRow, ...]:
    """Joins adjacent rows with equal placements and no communication, as long as their names fit into one row. Rows
    inside layers are joined too.
    """
    joined: list[ModuleRow] = []
    for row in rows:
        row = _with_children(row, _joined(row.children, width - 2))
        if joined and _alike(joined[-1], row) and len(joined[-1].label) + 1 + len(row.label) <= width:
            joined[-1] = _side_by_side(joined[-1], row)
        else:
            joined.append(row)
    return tuple(joined)


def _with_children(row: ModuleRow, children: tuple[ModuleRow, ...]) -> ModuleRow:
    return ModuleRow(
        row.label, row.paths, row.weight, row.output, row.compute, row.comm, row.held, row.moves, children, row.kind
    )


def _alike(first: ModuleRow, second: ModuleRow) -> bool:
    rows = (first, second)
    return (first.weight, first.output) == (second.weight, second.output) and not any(
        row.moves or row.children or row.count > 1 or row.label.startswith("(") for row in rows
    )


def _side_by_side(first: ModuleRow, second: ModuleRow) -> ModuleRow:
    return ModuleRow(
        f"{first.label} {second.label}",
        first.paths,
        first.weight,
        first.output,
        first.compute + second.compute,
        held=first.held + second.held,
    )


def _foot(plan: PlanRecord) -> Iterator[str]:
    yield ""
    yield from _sync(plan)
    yield from _totals(plan)
    yield from also_priced(plan)
    shown = plan.warnings if len(plan.warnings) <= MOST_WARNINGS else plan.warnings[: MOST_WARNINGS - 1]
    # Whole, however long: the end of a warning says what to do.
    yield from (f"warning    {' '.join(warning.split())}" for warning in shown)
    if len(shown) < len(plan.warnings):
        yield f"warning    {len(plan.warnings) - len(shown)} more in plan.warnings"
    paths = list(plan.parameters) or list(plan.outputs) or [""]
    path = next((path for path in paths if len(path) < 40), paths[0])
    asks = [f'ask        plan.why("{path}")', "plan.diff(other)", "plan.tree()", 'plan.table(by="op")']
    while len(asks) > 1 and len(" · ".join(asks)) > page_width():
        asks.pop()
    yield clip(" · ".join(asks), page_width())


def _sync(plan: PlanRecord) -> Iterator[str]:
    """The lines for gradients that are reduced and updated weights that are gathered once a step, in buckets. Of
    several stages, those of the busiest.
    """
    plan = _of_busiest(plan)
    for kind, label in (("gradient", "gradients"), ("refresh", "weights")):
        by_way: dict[tuple[str, str], list[Move]] = {}
        for move in moves_of(plan, kind):
            by_way.setdefault((move.what, move.way), []).append(move)
        groups = list(by_way.items())
        shown = groups if len(groups) <= 2 else groups[:1]
        for (what, changed), moves in shown:
            total = sum(move.bytes * move.count for move in moves)
            count = sum(move.count for move in moves)
            amount = f"{size(total)} in {count:g} tensor{'s' if count > 1 else ''}" if total else "local"
            yield _move_line(f"{label:<10} {what}  {changed}  {amount}", sum(move.seconds for move in moves))
        if len(shown) < len(groups):
            hidden = [move for _, moves in groups[len(shown) :] for move in moves]
            total = sum(move.bytes * move.count for move in hidden)
            text = f"{label:<10} {size(total)} more in {len(groups) - len(shown)} other ways"
            yield _move_line(text, sum(move.seconds for move in hidden))


def _of_busiest(plan: PlanRecord) -> PlanRecord:
    """The plan with only the lines of its busiest stage. They and the bubble add up to the step."""
    busiest = busiest_stage(plan)
    return replace(plan, lines=tuple(line for line in plan.lines if line.stage == busiest))


def _totals(plan: PlanRecord) -> Iterator[str]:
    label, filled = "total", "memory"
    if plan.stages > 1:
        label, filled = f"stage {busiest_stage(plan)}", f"in stage {fullest_stage(plan)}"
    plan = _of_busiest(plan)
    parts = {
        "compute": plan.seconds_of("compute"),
        "of that, forward again in backward": _recomputing(plan),
        "optimizer": plan.seconds_of("optimizer"),
        "state to the device and back": plan.seconds_of("offload"),
        "activations and weights to the host and back": plan.seconds_of("swap"),
        "reshard": plan.seconds_of("reshard"),
        "exchange of rows": plan.seconds_of("exchange"),
        "weight gather": plan.seconds_of("weight", "refresh"),
        "grad sync": plan.seconds_of("gradient"),
        "bubble": plan.predicted.bubble_seconds,
        "hidden by computing": plan.seconds_of("hidden"),
        "quicker on cores that waiting ranks leave free": -plan.predicted.freed_seconds,
    }
    total = plan.predicted.step_seconds
    yield from _wrapped(label, [f"{name} {duration(s)} ({share(s, total)})" for name, s in parts.items() if s])
    yield from _wrapped(filled, memory_parts(plan))


def _recomputing(plan: PlanRecord) -> float:
    """Seconds of computing in which backward repeats forward."""
    again = {name + RECOMPUTED for name in plan.recomputed}
    return math.fsum(line.seconds for line in plan.lines if line.kind == "compute" and line.name in again)


def memory_parts(plan: PlanRecord) -> list[str]:
    """What the fullest device holds at its peak, part by part, and what its host and a disk hold besides. A step that
    has gradients may hold none at its peak, which is said."""
    p = plan.predicted
    held = {**p.peak_parts, "in host memory, besides": p.host_bytes, "on a local disk, besides": p.nvme_bytes}
    texts = {name: f"{name} {size(count)}" for name, count in held.items() if count}
    if plan.gradient_values and not p.gradient_bytes:
        texts["gradients"] = "no gradients at the peak"
    return [texts[name] for name in held if name in texts]


def _wrapped(label: str, parts: Sequence[str]) -> Iterator[str]:
    # Lines break only between the parts, so that a figure stays with its unit.
    tied = " · ".join(part.replace(" ", "\0") for part in parts)
    width = max(11, len(label) + 1)
    for position, line in enumerate(textwrap.wrap(tied, page_width() - width, break_on_hyphens=False)):
        yield f"{label if position == 0 else '':<{width}}{line}".replace("\0", " ")
