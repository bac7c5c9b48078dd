"""The stages of a plan as a table. Equal stages are folded; messages have lines of their own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from textwrap import wrap

from autopar.ir.plan_record import PlanRecord

from .module_tree import numbers
from .page_width import page_width
from .quantities import clip, duration, microbatches_text, share, size
from .stages import Sent, StageRow, busiest_stage, folded_modules, stage_rows

# Characters of the columns: `1024-2047` and `123.4 GiB` fit. The column of stages is as wide as the longest, within two
# bounds. Chosen: `{1..14}, 17 each` fits.
_NAME, _LONGEST_NAME, _RANKS, _FIGURE = 9, 18, 10, 10


def schedule_line(plan: PlanRecord) -> str:
    """``2 stages · 1f1b · 4 microbatches · 1 chunk a stage · bubble 1.2 ms (18%) in stage 0``. The bubble is that of
    the busiest stage."""
    chunks = plan.pipeline.chunks_per_stage if plan.pipeline else 1
    bubble = plan.predicted.bubble_seconds
    parts = [
        f"{plan.stages} stages",
        plan.schedule or "",
        microbatches_text(plan.microbatches),
        f"{chunks} chunk{'s' if chunks > 1 else ''} a stage",
        f"bubble {duration(bubble)} ({share(bubble, plan.predicted.step_seconds)}) in stage {busiest_stage(plan)}",
    ]
    return clip(" · ".join(filter(None, parts)), page_width())


def stage_lines(plan: PlanRecord, budget: int) -> list[str]:
    """The table of stages in at most ``budget`` lines (at least 4). If there are too few lines, messages of backward
    are left out first, then all messages, then modules that a row has no room for, then stages."""
    groups = stage_groups(plan)
    width = min(max(_NAME, *(len(_name(group)) for group in groups)), _LONGEST_NAME)
    columns = _row(width, "stage", "ranks", "holds", "fwd, 1 mb", "bwd, 1 mb", "busy, step", "peak")
    head = [schedule_line(plan), *_device_lines(plan), columns]
    for phases, whole in ((("forward", "backward"), True), (("forward",), True), ((), True), ((), False)):
        body = [line for group in groups for line in _group_lines(group, plan.microbatches, phases, width, whole)]
        if len(head) + len(body) <= budget:
            return head + body
    shown = max(budget - len(head) - 1, 1)
    hidden = [row for group in groups[shown:] for row in group]
    busy = sorted(row.busy for row in hidden)
    more = f'… {len(hidden)} more stages, busy {duration(busy[0])} to {duration(busy[-1])}: plan.table(by="stage")'
    return head + body[:shown] + [more]


def _device_lines(plan: PlanRecord) -> Iterator[str]:
    """The line that says on which devices the stages lie, where there are several kinds."""
    if plan.pipeline is None or not plan.pipeline.devices:
        return
    kinds: dict[tuple[str, int], list[str]] = {}
    for stage, kind in enumerate(zip(plan.pipeline.devices, plan.pipeline.limits, strict=True)):
        kinds.setdefault(kind, []).append(str(stage))
    parts = (f"{numbers(stages)} on {name} (at most {size(limit)})" for (name, limit), stages in kinds.items())
    yield clip(f"stages {' · '.join(parts)}", page_width())


def stage_groups(plan: PlanRecord) -> list[list[StageRow]]:
    """Groups stages whose rows read alike, in the order of their first stages."""
    groups: dict[Hashable, list[StageRow]] = {}
    for row in stage_rows(plan):
        sent = tuple((s.target - s.source, s.phase, s.place, size(s.bytes), duration(s.seconds)) for s in row.sent)
        key = duration(row.forward), duration(row.backward), duration(row.busy), size(row.peak), sent
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _name(group: list[StageRow]) -> str:
    return numbers([str(row.stage) for row in group]) + (" each" if len(group) > 1 else "")


def _group_lines(
    group: list[StageRow], microbatches: int, phases: tuple[str, ...], width: int, whole: bool
) -> Iterator[str]:
    """The row of a group, and its messages of some ``phases``. ``whole``: modules that do not fit into the row go on
    in the lines after it."""
    first = group[0]
    chunks = [[module for row in group for module in row.modules[i]] for i in range(len(first.modules))]
    holds = " | ".join(map(folded_modules, chunks))
    start = wrap(holds, _room(width), break_on_hyphens=False)[0] if whole and holds else holds
    yield _row(
        width,
        _name(group),
        ranks_text(group),
        start,
        duration(first.forward),
        duration(first.backward),
        duration(first.busy),
        size(first.peak),
    )
    indent = " " * (width + _RANKS + 2)
    yield from (indent + line for line in wrap(holds[len(start) :], page_width() - len(indent), break_on_hyphens=False))
    for message in first.sent:
        if message.phase in phases:
            yield _sent_line(message, microbatches, len(group) > 1)


def ranks_text(group: list[StageRow]) -> str:
    """``8-15``: the ranks of stages that are shown together; with ``…`` if others lie between."""
    low, high = group[0].ranks[0], group[-1].ranks[1]
    apart = group[-1].stage - group[0].stage + 1 > len(group)
    return f"{low}-{high}{'…' if apart else ''}" if high > low else str(low)


def _room(width: int) -> int:
    """Characters for what a stage holds, beside the other columns."""
    return page_width() - width - _RANKS - 4 * _FIGURE - 6


def _row(width: int, name: str, ranks: str, holds: str, *figures: str) -> str:
    room = _room(width)
    cells = f"{clip(name, width):<{width}} {clip(ranks, _RANKS):<{_RANKS}} {clip(holds, room):<{room}}"
    return cells + "".join(f" {figure:>{_FIGURE}}" for figure in figures)


def _sent_line(message: Sent, microbatches: int, folded: bool) -> str:
    text = f"  ↳ send {sent_text(message, microbatches)} → {_target(message, folded)}"
    room = page_width() - _FIGURE - 1
    return f"{clip(text, room):<{room}} {duration(message.seconds):>{_FIGURE}}"


def sent_text(message: Sent, microbatches: int) -> str:
    """``add_12  (S(0))  128 KiB x4``."""
    more = f" and {len(message.names) - 1} more" if len(message.names) > 1 else ""
    return f"{message.names[0]}{more}  {message.place}  {size(message.bytes)} x{microbatches}"


def _target(message: Sent, folded: bool) -> str:
    away = message.target - message.source
    if not folded:
        return f"stage {message.target}"
    if abs(away) == 1:
        return "the next" if away > 0 else "the one before"
    return f"{abs(away)} stages {'on' if away > 0 else 'back'}"
