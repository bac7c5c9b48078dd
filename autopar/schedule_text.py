"""The text and JSON forms of a :class:`~autopar.schedule.Schedule`; each round-trips.

::

    schedule 1f1b microbatches=2 training
    placement 0 1
    edges 0>1
    in_flight 2 1
    rank 0: F0.0 SF0>1.0 F0.1 SF0>1.1 RB1>0.0 B0.0 RB1>0.1 B0.1 reduce0 step
    rank 1: RF0>1.0 F1.0 B1.0 SB1>0.0 RF0>1.1 F1.1 B1.1 SB1>0.1 reduce1 step

An edge that carries no gradient back is written ``0>1!``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import ScheduleError
from .schedule import Edge, Instruction, Kind, Schedule

_COMPUTE: dict[str, Kind] = {"F": "forward", "I": "input_gradient", "W": "weight_gradient", "B": "backward"}
_MESSAGE: dict[str, Kind] = {
    "SF": "send_forward",
    "RF": "receive_forward",
    "SB": "send_backward",
    "RB": "receive_backward",
}
_COMPUTES = re.compile(r"([FIWB])(\d+)\.(\d+)")
_MOVES = re.compile(r"([SR][FB])(\d+)>(\d+)\.(\d+)")
_REDUCES = re.compile(r"reduce(\d+)")
_EDGE = re.compile(r"(\d+)>(\d+)(!?)")
_HEAD = re.compile(r"schedule (.+) microbatches=(\d+) (training|forward)")
_RANK = re.compile(r"rank (\d+):(.*)")


def parse_instruction(text: str) -> Instruction:
    """Inverse of ``str(instruction)``. Raises :class:`ScheduleError`."""
    if found := _COMPUTES.fullmatch(text):
        return Instruction(_COMPUTE[found[1]], int(found[2]), int(found[3]))
    if found := _MOVES.fullmatch(text):
        source, target, microbatch = int(found[2]), int(found[3]), int(found[4])
        chunk, peer = (source, target) if text[0] == "S" else (target, source)
        return Instruction(_MESSAGE[found[1]], chunk, microbatch, peer)
    if found := _REDUCES.fullmatch(text):
        return Instruction("reduce", int(found[1]))
    if text == "step":
        return Instruction("step")
    raise ScheduleError(f"{text!r} is no instruction: F2.5, I2.5, W2.5, B2.5, SF0>1.5, RF, SB, RB, reduce2 or step")


def _print_edge(edge: Edge) -> str:
    return f"{edge.source}>{edge.target}{'' if edge.gradient else '!'}"


def _parse_edge(text: str) -> Edge:
    found = _EDGE.fullmatch(text)
    if not found:
        raise ScheduleError(f"{text!r} is no edge: 0>1, or 0>1! if no gradient comes back")
    return Edge(int(found[1]), int(found[2]), not found[3])


def print_schedule(schedule: Schedule) -> str:
    """The text form; ``str(schedule)``."""
    ending = "training" if schedule.training else "forward"
    lines = [
        f"schedule {schedule.name} microbatches={schedule.microbatches} {ending}",
        " ".join(["placement", *map(str, schedule.placement)]),
        " ".join(["edges", *map(_print_edge, schedule.edges)]),
        " ".join(["in_flight", *map(str, schedule.in_flight)]),
    ]
    lines += [f"rank {rank}: {' '.join(map(str, listed))}".rstrip() for rank, listed in enumerate(schedule.ranks)]
    return "\n".join(lines) + "\n"


def _words(line: str, head: str) -> list[str]:
    if line.split(" ")[0] != head:
        raise ScheduleError(f"expected a line that begins with {head!r}, found {line!r}")
    return line.split()[1:]


def _integers(words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ScheduleError(f"expected whole numbers, found {' '.join(words)!r}") from error


def parse_schedule(text: str) -> Schedule:
    """Inverse of :func:`print_schedule`. Raises :class:`ScheduleError`."""
    lines = text.strip().splitlines()
    if len(lines) < 5:
        raise ScheduleError("a schedule has lines for schedule, placement, edges, in_flight and at least one rank")
    head = _HEAD.fullmatch(lines[0])
    if not head:
        raise ScheduleError(f"expected 'schedule NAME microbatches=M training|forward', found {lines[0]!r}")
    ranks = []
    for rank, line in enumerate(lines[4:]):
        found = _RANK.fullmatch(line)
        if not found or int(found[1]) != rank:
            raise ScheduleError(f"expected 'rank {rank}: ...', found {line!r}")
        ranks.append(tuple(map(parse_instruction, found[2].split())))
    return Schedule(
        name=head[1],
        microbatches=int(head[2]),
        placement=_integers(_words(lines[1], "placement")),
        edges=tuple(map(_parse_edge, _words(lines[2], "edges"))),
        ranks=tuple(ranks),
        in_flight=_integers(_words(lines[3], "in_flight")),
        training=head[3] == "training",
    )


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """Plain data; instructions and edges in their text form."""
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "edges": [_print_edge(edge) for edge in schedule.edges],
        "in_flight": list(schedule.in_flight),
        "training": schedule.training,
        "ranks": [" ".join(map(str, listed)) for listed in schedule.ranks],
    }


def schedule_from_json(data: Mapping[str, Any]) -> Schedule:
    """Inverse of :func:`schedule_to_json`. Raises :class:`ScheduleError`."""
    try:
        return Schedule(
            name=str(data["name"]),
            microbatches=int(data["microbatches"]),
            placement=tuple(map(int, data["placement"])),
            edges=tuple(map(_parse_edge, data["edges"])),
            ranks=tuple(tuple(map(parse_instruction, listed.split())) for listed in data["ranks"]),
            in_flight=tuple(map(int, data["in_flight"])),
            training=bool(data["training"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ScheduleError(f"this is not a schedule: {type(error).__name__}: {error}") from error
