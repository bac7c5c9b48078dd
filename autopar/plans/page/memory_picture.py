"""The memory of a step against the limit, as shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.plans.views.memory_over_step import Levels, MemoryOverStep
from autopar.plans.views.quantities import duration, size

from .timeline_picture import WIDTH

# Units of the picture. Chosen.
HEIGHT = 180
# Space above the highest line, as a factor. Chosen: room for its label.
_ROOM = 1.12
# Points of a line. Chosen: one for each unit of the width.
_MOST_POINTS = 1000


@dataclass(frozen=True)
class MemoryPicture:
    """``resting``, ``held``: areas, one on the other; ``peak``: the line above them that temporary bytes reach;
    ``lines``: (y, text, class) of the limit and the peak; ``about``: a sentence that says what is to be seen."""

    width: float
    height: float
    resting: str
    held: str
    peak: str
    lines: tuple[tuple[float, str, str], ...]
    ticks: tuple[tuple[float, str], ...]
    about: str


def memory_picture(memory: MemoryOverStep, limit: int, stages: int) -> MemoryPicture:
    """The picture of ``memory`` on devices that may take ``limit`` bytes. A limit far above the peak is out of the
    picture."""
    shown = limit <= 4 * memory.peak
    highest = max((held for _, held in memory.levels), default=0.0) + memory.temporary
    top = max(memory.peak, highest, limit if shown else 0, 1.0) * _ROOM

    def y(held: float) -> float:
        return round(HEIGHT * (1 - held / top), 1)

    levels = thinned(memory.levels, memory.seconds)
    lines = [(y(memory.peak), f"peak {size(memory.peak)}", "peak")]
    if shown:
        lines.append((y(limit), f"limit {size(limit)}", "limit"))
    where = f"stage {memory.stage}, the fullest" if stages > 1 else "every device"
    resting = memory.resting
    about = (
        f"Memory of {where}: {size(resting)} rest, {size(memory.peak - resting)} come and go, of which up to "
        f"{size(memory.temporary)} are temporary; peak {size(memory.peak)} of {size(limit)}"
    )
    return MemoryPicture(
        WIDTH,
        HEIGHT,
        resting=f"M0 {HEIGHT}V{y(resting)}H{WIDTH}V{HEIGHT}z",
        held=f"M0 {HEIGHT}" + _stairs(levels, memory.seconds, y_of=y) + f"V{HEIGHT}z",
        peak=_upper(levels, memory, y_of=y),
        lines=tuple(lines),
        ticks=tuple((WIDTH * quarter / 4, duration(memory.seconds * quarter / 4)) for quarter in range(5)),
        about=about,
    )


def thinned(levels: Levels, seconds: float) -> Levels:
    """At most :data:`_MOST_POINTS` of ``levels``: of those that fall together, the highest."""
    if len(levels) <= _MOST_POINTS or seconds <= 0:
        return levels
    highest: dict[int, tuple[float, float]] = {}
    for time, held in levels:
        at = int(time / seconds * _MOST_POINTS)
        if at not in highest or highest[at][1] < held:
            highest[at] = (time, held)
    return tuple(highest[at] for at in sorted(highest))


def _stairs(levels: Levels, seconds: float, y_of: Callable[[float], float]) -> str:
    steps = (f"H{_x(time, seconds)}V{y_of(held)}" for time, held in levels)
    return "".join(steps) + f"H{WIDTH}"


def _upper(levels: Levels, memory: MemoryOverStep, y_of: Callable[[float], float]) -> str:
    raised = tuple((time, held + memory.temporary) for time, held in levels)
    first = raised[0][1] if raised else 0.0
    return f"M0 {y_of(first)}" + _stairs(raised, memory.seconds, y_of)


def _x(time: float, seconds: float) -> str:
    return f"{time / seconds * WIDTH:.1f}".removesuffix(".0") if seconds else "0"
