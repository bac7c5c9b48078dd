"""Pipeline schedules as data: the actions of each pipeline rank in a step, in order.

The model is cut into *chunks*, numbered so that values are only sent from lower to higher numbers. ``placement`` says
which pipeline rank (a group of devices) holds each chunk. An :class:`Edge` says that a chunk uses a value that another
chunk computes. Edges may join any two chunks, so a skip connection is sent directly from its producer to its consumer.
An edge between two ranks carries one message forward per microbatch and, unless the edge says otherwise, one message
back with the gradient. An edge within a rank needs no action.

:mod:`.actions` says what each action does and what messages mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.errors import ScheduleError

from .actions import Action, Edge, Kind
from .text import parse_action, parse_edge, parse_schedule, print_edge


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank in one step.

    ``placement[chunk]`` is the rank that holds a chunk; ``ranks[rank]`` are the actions of a rank in order.
    ``in_flight[rank]`` is a promise: at no position of the list have more (chunk, microbatch) pairs begun forward
    without having finished backward, weight gradients included. A schedule that is not ``training`` only runs forward,
    and promises nothing.

    Raises :class:`ScheduleError` if the parts do not fit together. :func:`autopar.schedule.check.check` proves that the
    lists can run.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    ranks: tuple[tuple[Action, ...], ...]
    in_flight: tuple[int, ...]
    training: bool = True

    def __post_init__(self) -> None:
        check_chunks(self.placement, self.edges, self.microbatches)
        if max(self.placement) >= len(self.ranks):
            held = self.placement.index(max(self.placement))
            message = f"chunk {held} is on rank {self.placement[held]} of a schedule of {len(self.ranks)} ranks"
            raise ScheduleError(f"{message}: ranks are counted from 0")
        if len(self.in_flight) != len(self.ranks):
            message = f"in_flight has {len(self.in_flight)} entries for {len(self.ranks)} ranks"
            raise ScheduleError(f"{message}: promise one number for each rank")

    @property
    def stages(self) -> int:
        """The number of pipeline ranks."""
        return len(self.ranks)

    @property
    def chunks(self) -> int:
        return len(self.placement)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each rank, ascending."""
        return held_chunks(self.placement, self.stages)

    def reordered(self, order: tuple[int, ...]) -> Schedule:
        """The same schedule with what rank s did on rank ``order[s]``: devices differ, and need not follow each other
        in the order of the model."""
        if order == tuple(range(self.stages)):
            return self
        back = sorted(range(self.stages), key=order.__getitem__)
        return replace(
            self,
            placement=tuple(order[rank] for rank in self.placement),
            ranks=tuple(self.ranks[rank] for rank in back),
            in_flight=tuple(self.in_flight[rank] for rank in back),
        )

    def weight_gradients(self, chunk: int) -> tuple[Kind, ...]:
        """The kinds of the actions that compute the weight gradients of a chunk, one for each microbatch in order:
        "backward" or, if that is split, "weight_gradient"."""
        listed = self.ranks[self.placement[chunk]]
        return tuple(i.kind for i in listed if i.chunk == chunk and i.kind in ("backward", "weight_gradient"))

    def ends_with(self, chunk: int) -> bool:
        """Whether the rank of a chunk has nothing left to compute or to send once the chunk's gradients are
        computed."""
        for action in reversed(self.ranks[self.placement[chunk]]):
            if action.chunk == chunk and action.kind in ("backward", "weight_gradient"):
                return True
            if action.computes or action.sends:
                return False
        return False

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yields (rank, position, action), rank by rank."""
        for rank, listed in enumerate(self.ranks):
            for position, action in enumerate(listed):
                yield rank, position, action

    def __str__(self) -> str:
        """The text form, which :meth:`from_text` reads."""
        ending = "training" if self.training else "forward"
        lines = [
            f"schedule {self.name} microbatches={self.microbatches} {ending}",
            " ".join(["placement", *map(str, self.placement)]),
            " ".join(["edges", *map(print_edge, self.edges)]),
            " ".join(["in_flight", *map(str, self.in_flight)]),
        ]
        lines += [f"rank {rank}: {' '.join(map(str, listed))}".rstrip() for rank, listed in enumerate(self.ranks)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> Schedule:
        """Inverse of ``str``. Raises :class:`ScheduleError`."""
        return Schedule(**parse_schedule(text))

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain data, with actions and edges in their text form. Inverse of :meth:`from_json`."""
        return {
            "name": self.name,
            "microbatches": self.microbatches,
            "placement": list(self.placement),
            "edges": [print_edge(edge) for edge in self.edges],
            "in_flight": list(self.in_flight),
            "training": self.training,
            "ranks": [" ".join(map(str, listed)) for listed in self.ranks],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Schedule:
        """Inverse of :meth:`to_json`. Raises :class:`ScheduleError` that names what is wrong."""
        _check_json(data)
        return Schedule(
            name=data["name"],
            microbatches=data["microbatches"],
            placement=tuple(data["placement"]),
            edges=tuple(map(parse_edge, data["edges"])),
            ranks=tuple(tuple(map(parse_action, listed.split())) for listed in data["ranks"]),
            in_flight=tuple(data["in_flight"]),
            training=data["training"],
        )


# What each field of the plain data is: one of a kind, or a list of them, and how to call it.
_JSON: Mapping[str, tuple[type, bool, str]] = {
    "name": (str, False, "a text"),
    "microbatches": (int, False, "a whole number"),
    "placement": (int, True, "a list of whole numbers"),
    "edges": (str, True, "a list of texts"),
    "in_flight": (int, True, "a list of whole numbers"),
    "training": (bool, False, "true or false"),
    "ranks": (str, True, "a list of texts"),
}


def _check_json(data: Any) -> None:
    """Raises :class:`ScheduleError` that names the field of plain data that is missing, unknown or of another kind."""
    if not isinstance(data, Mapping):
        raise ScheduleError(f"{data!r:.80} is not a table")
    for name in data.keys() ^ _JSON.keys():
        raise ScheduleError(f"{name!r} is {'missing' if name in _JSON else 'no field of a schedule'}")
    for name, (kind, is_list, called) in _JSON.items():
        items = data[name] if is_list else [data[name]]
        if not isinstance(items, (list, tuple)) or not all(type(item) is kind for item in items):
            raise ScheduleError(f"{name} is {data[name]!r:.80}, not {called}")


def check_chunks(placement: tuple[int, ...], edges: tuple[Edge, ...], microbatches: int) -> None:
    """Raises :class:`ScheduleError` unless there are chunks and microbatches, and every edge leads to a later chunk."""
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} microbatches are not a step: at least 1")
    if not placement or min(placement) < 0:
        raise ScheduleError(f"placement {placement} must name a rank, counted from 0, for each of at least one chunk")
    for edge in edges:
        if not 0 <= edge.source < edge.target < len(placement):
            message = f"edge {edge.source}>{edge.target} of {len(placement)} chunks"
            raise ScheduleError(
                f"{message}: values are sent from a lower to a higher chunk; number the chunks in order"
            )
    if len({edge[:2] for edge in edges}) < len(edges):
        raise ScheduleError("an edge is named twice: one edge carries all a chunk needs from another")


def held_chunks(placement: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """The chunks that each of ``stages`` ranks holds, ascending."""
    return tuple(chunks_at(rank, placement) for rank in range(stages))


def chunks_at(rank: int, placement: tuple[int, ...]) -> tuple[int, ...]:
    """The chunks that ``rank`` holds, ascending."""
    return tuple(chunk for chunk, at in enumerate(placement) if at == rank)


def chain(chunks: int) -> tuple[Edge, ...]:
    """The edges of a chain, in which each chunk feeds the next."""
    return tuple(Edge(c, c + 1) for c in range(chunks - 1))


def loop_placement(stages: int, chunks: int) -> tuple[int, ...]:
    """The placement that assigns chunks to the ranks in turn: 0 1 2 0 1 2 (``chunks`` per rank)."""
    return tuple(c % stages for c in range(stages * chunks))


def v_placement(stages: int) -> tuple[int, ...]:
    """The placement of two chunks per rank, down and back up: 0 1 2 2 1 0. The first rank also holds the loss."""
    return (*range(stages), *reversed(range(stages)))
