"""The part of a plan's text that compares it with other plans."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from autopar.ir.plan_record import PlanRecord, Predicted

from .page_width import page_width
from .quantities import clip, duration, longer, size, trim

# Other plans that are listed. Chosen: the three of a plan without stages, that plan, and two with stages.
MOST_BASELINES = 6
# Kinds that people ask for, by how their names begin.
KINDS = ("no stages", "FSDP", "rule of thumb")
_OF_A_STAGE = re.compile(r" x \([^)]*\)")
_Named = tuple[str, Predicted | None]


def also_priced(plan: PlanRecord) -> Iterator[str]:
    """The lines of other plans that were priced, and of kinds of which none was."""
    possible = ((name, priced) for name, priced in plan.baselines.items() if name not in plan.excluded)
    others = sorted(possible, key=lambda item: item[1].step_seconds if item[1] else math.inf)
    shown = others if len(others) <= MOST_BASELINES else _first(others, MOST_BASELINES - 1)
    rows = [(name, _compared(plan, other)) for name, other in shown]
    rows += [(name, f"{'excluded':>21}   {why}") for name, why in plan.excluded.items()]
    for position, (name, figures) in enumerate(rows):
        kind, _, described = name.partition(": ")
        room = min(34, page_width() - 13 - len(figures))
        yield f"{'also priced' if position == 0 else '':<12}{_in_short(kind, room):<{room}} {figures}"
        if described:  # What a kind of plan is here: a line of its own, since it is longer than the column.
            yield f"{'':<14}{trim(described, page_width() - 14)}"
    if len(shown) < len(others):
        yield f"{'':<12}{len(others) - len(shown)} more in plan.baselines"


def _in_short(kind: str, room: int) -> str:
    """A kind of plan in at most ``room`` characters; of pipelines, the devices of a stage are left out first."""
    return clip(kind if len(kind) <= room else _OF_A_STAGE.sub("", kind), room)


def _first(others: Sequence[_Named], most: int) -> list[_Named]:
    """Of other plans, the quickest first, ``most``: the best of each of :data:`KINDS`, and the quickest besides."""
    of_kinds = [next((each for each in others if each[0].startswith(kind)), None) for kind in KINDS]
    kept = [each for each in of_kinds if each is not None]
    kept += [each for each in others if each not in kept][: most - len(kept)]
    return [each for each in others if each in kept]


def _compared(plan: PlanRecord, other: Predicted | None) -> str:
    """Compares a baseline with the plan: its step, how much longer that is, its memory peak, and whether it fits."""
    if other is None:
        return f"{'not possible':>21}   no such placements found"
    fits = other.peak_bytes <= plan.least_limit
    note = f"peak {size(other.peak_bytes)}" + ("" if fits else ", does not fit")
    return f"{duration(other.step_seconds):>9} {longer(other.step_seconds, plan.predicted.step_seconds):>7}   {note}"
