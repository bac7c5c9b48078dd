"""The text form of a :class:`~autopar.schedule.schedule.Schedule`, which round-trips.

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
from typing import Any

from autopar.errors import ScheduleError

from .actions import Action, Edge, Kind

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


def parse_action(text: str) -> Action:
    """Inverse of ``str(action)``. Raises :class:`ScheduleError`."""
    if match := _COMPUTES.fullmatch(text):
        return Action(_COMPUTE[match[1]], int(match[2]), int(match[3]))
    if match := _MOVES.fullmatch(text):
        source, target, microbatch = int(match[2]), int(match[3]), int(match[4])
        chunk, peer = (source, target) if text[0] == "S" else (target, source)
        return Action(_MESSAGE[match[1]], chunk, microbatch, peer)
    if match := _REDUCES.fullmatch(text):
        return Action("reduce", int(match[1]))
    if text == "step":
        return Action("step")
    raise ScheduleError(f"{text!r} is not an action: F2.5, I2.5, W2.5, B2.5, SF0>1.5, RF, SB, RB, reduce2 or step")


def print_edge(edge: Edge) -> str:
    return f"{edge.source}>{edge.target}{'' if edge.gradient else '!'}"


def parse_edge(text: str) -> Edge:
    match = _EDGE.fullmatch(text)
    if not match:
        raise ScheduleError(f"{text!r} is not an edge: write 0>1, or 0>1! if no gradient comes back")
    return Edge(int(match[1]), int(match[2]), not match[3])


def _words(line: str, head: str) -> list[str]:
    if line.split(" ")[0] != head:
        raise ScheduleError(f"expected a line that begins with {head!r}, found {line!r}")
    return line.split()[1:]


def _integers(words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ScheduleError(f"expected whole numbers, found {' '.join(words)!r}") from error


def parse_schedule(text: str) -> dict[str, Any]:
    """The fields of a schedule from its text form. Raises :class:`ScheduleError`."""
    lines = text.strip().splitlines()
    if len(lines) < 5:
        raise ScheduleError("a schedule has lines for schedule, placement, edges, in_flight and at least one rank")
    head = _HEAD.fullmatch(lines[0])
    if not head:
        raise ScheduleError(f"expected 'schedule NAME microbatches=M training|forward', found {lines[0]!r}")
    ranks = []
    for rank, line in enumerate(lines[4:]):
        match = _RANK.fullmatch(line)
        if not match or int(match[1]) != rank:
            raise ScheduleError(f"expected 'rank {rank}: ...', found {line!r}")
        ranks.append(tuple(map(parse_action, match[2].split())))
    return {
        "name": head[1],
        "microbatches": int(head[2]),
        "placement": _integers(_words(lines[1], "placement")),
        "edges": tuple(map(parse_edge, _words(lines[2], "edges"))),
        "ranks": tuple(ranks),
        "in_flight": _integers(_words(lines[3], "in_flight")),
        "training": head[3] == "training",
    }
