"""Pipeline schedules as data: what each pipeline rank does in a step, in order.

The model is cut into *chunks*, numbered so that values only travel from lower to higher numbers. ``placement`` says
which pipeline rank (a group of devices) holds each chunk. An :class:`Edge` says that a chunk uses a value another one
computes; edges may join any two chunks, so a skip connection travels directly from its producer to its consumer. Along
an edge between two ranks one message goes forward per microbatch and, unless the edge says otherwise, one goes back
with the gradient. Along an edge within a rank the value is handed over without an instruction.

=========================  ==========================================================================================
``forward``                forward of ``chunk`` for ``microbatch``
``input_gradient``         backward as far as the chunk's inputs need it
``weight_gradient``        the rest of backward: adds to the gradients of the chunk's parameters
``backward``               both at once, for schedules that do not split backward
``send_forward``           starts sending what ``chunk`` computed to the chunk ``peer``; never waits
``receive_forward``        posts the receive of what ``chunk`` needs from ``peer``
``send_backward``          starts sending the gradient of what ``chunk`` received from ``peer`` back to it
``receive_backward``       posts the receive of the gradient of what ``chunk`` sent to ``peer``
``reduce``                 starts reducing the gradients of the chunk's parameters over the devices of its rank
``step``                   awaits every reduction and sums the gradients of weights that several ranks hold; last
=========================  ==========================================================================================

**What messages mean.** Sends are asynchronous (``isend``), and receives are posted where they stand in the list
(``irecv``); the instruction that uses the value waits for it. Messages from one rank to another carry no tag: the k-th
send matches the k-th receive, whichever edge, direction or microbatch each names. A list that keeps to that and cannot
stall even if every send waits for its receive (:mod:`autopar.schedule_check` proves both) runs on buffered and on
unbuffered transports alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from .errors import ScheduleError

Kind = Literal[
    "forward",
    "input_gradient",
    "weight_gradient",
    "backward",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
    "reduce",
    "step",
]
COMPUTE: tuple[Kind, ...] = ("forward", "input_gradient", "weight_gradient", "backward")
SENDS: tuple[Kind, ...] = ("send_forward", "send_backward")
RECEIVES: tuple[Kind, ...] = ("receive_forward", "receive_backward")
_SHORT: dict[Kind, str] = {
    "forward": "F",
    "input_gradient": "I",
    "weight_gradient": "W",
    "backward": "B",
    "send_forward": "SF",
    "receive_forward": "RF",
    "send_backward": "SB",
    "receive_backward": "RB",
    "reduce": "reduce",
    "step": "step",
}


class Edge(NamedTuple):
    """The chunk ``target`` uses a value that ``source`` computes; ``gradient``: and sends its gradient back."""

    source: int
    target: int
    gradient: bool = True


class Message(NamedTuple):
    """What travels from the chunk ``source`` to the chunk ``target``: a value (``"forward"``), or a gradient."""

    direction: Literal["forward", "backward"]
    source: int
    target: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing a pipeline rank does. ``chunk`` is held by that rank (-1 for ``step``); ``microbatch`` is -1 for
    ``reduce`` and ``step``; ``peer`` is the chunk at the other end of a message, else -1."""

    kind: Kind
    chunk: int = -1
    microbatch: int = -1
    peer: int = -1

    @property
    def computes(self) -> bool:
        return self.kind in COMPUTE

    @property
    def sends(self) -> bool:
        return self.kind in SENDS

    @property
    def receives(self) -> bool:
        return self.kind in RECEIVES

    @property
    def message(self) -> Message:
        """What a send or receive moves; equal at both ends."""
        source, target = (self.chunk, self.peer) if self.sends else (self.peer, self.chunk)
        return Message("forward" if self.kind.endswith("forward") else "backward", source, target, self.microbatch)

    def __str__(self) -> str:
        """``F2.5``: forward of chunk 2 for microbatch 5; ``SB3>2.5``: send the gradient of chunk 3 to chunk 2."""
        short = _SHORT[self.kind]
        if self.sends or self.receives:
            message = self.message
            return f"{short}{message.source}>{message.target}.{self.microbatch}"
        if self.kind == "step":
            return short
        return f"{short}{self.chunk}" if self.kind == "reduce" else f"{short}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every pipeline rank does in one step.

    ``placement[chunk]`` is the rank that holds a chunk; ``ranks[rank]`` its instructions in order. ``in_flight[rank]``
    is promised: at no position of the list have more (chunk, microbatch) pairs begun forward without having finished
    backward, weight gradients included. A schedule that is not ``training`` only goes forward, and promises nothing.

    Raises :class:`ScheduleError` if the parts do not fit each other; whether the lists can run is
    :func:`autopar.schedule_check.check`'s to say.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    edges: tuple[Edge, ...]
    ranks: tuple[tuple[Instruction, ...], ...]
    in_flight: tuple[int, ...]
    training: bool = True

    def __post_init__(self) -> None:
        check_chunks(self.placement, self.edges, self.microbatches)
        if max(self.placement) >= len(self.ranks):
            held = self.placement.index(max(self.placement))
            message = f"chunk {held} lies on rank {self.placement[held]} of a schedule of {len(self.ranks)} ranks"
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

    def weight_gradients(self, chunk: int) -> tuple[Kind, ...]:
        """What makes the weight gradients of a chunk, one for each microbatch in order: "backward", or, where that is
        in halves, "weight_gradient"."""
        listed = self.ranks[self.placement[chunk]]
        return tuple(i.kind for i in listed if i.chunk == chunk and i.kind in ("backward", "weight_gradient"))

    def ends_with(self, chunk: int) -> bool:
        """Whether the rank of a chunk has nothing left to compute or to send once the chunk's gradients are made."""
        listed = self.ranks[self.placement[chunk]]
        made = [i for i, one in enumerate(listed) if one.chunk == chunk and one.kind in ("backward", "weight_gradient")]
        return bool(made) and not any(one.computes or one.sends for one in listed[made[-1] + 1 :])

    def instructions(self) -> Iterator[tuple[int, int, Instruction]]:
        """(rank, position, instruction), rank by rank."""
        for rank, listed in enumerate(self.ranks):
            for position, instruction in enumerate(listed):
                yield rank, position, instruction

    def __str__(self) -> str:
        from .schedule_text import print_schedule

        return print_schedule(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data that JSON has; inverse of :func:`autopar.schedule_text.schedule_from_json`."""
        from .schedule_text import schedule_to_json

        return schedule_to_json(self)


def check_chunks(placement: tuple[int, ...], edges: tuple[Edge, ...], microbatches: int) -> None:
    """Raises :class:`ScheduleError` unless there is something to do and every edge leads to a later chunk."""
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} microbatches are not a step: at least 1")
    if not placement or min(placement) < 0:
        raise ScheduleError(f"placement {placement} must name a rank, counted from 0, for each of at least one chunk")
    for edge in edges:
        if not 0 <= edge.source < edge.target < len(placement):
            message = f"edge {edge.source}>{edge.target} of {len(placement)} chunks"
            raise ScheduleError(f"{message}: values travel from a lower to a higher chunk; number the chunks in order")
    if len({edge[:2] for edge in edges}) < len(edges):
        raise ScheduleError("an edge is named twice: one edge carries all a chunk needs from another")


def held_chunks(placement: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """The chunks that each of ``stages`` ranks holds, ascending."""
    return tuple(tuple(c for c, at in enumerate(placement) if at == rank) for rank in range(stages))


def chain(chunks: int) -> tuple[Edge, ...]:
    """Each chunk feeds the next."""
    return tuple(Edge(c, c + 1) for c in range(chunks - 1))


def loop_placement(stages: int, chunks: int) -> tuple[int, ...]:
    """Chunks dealt to the ranks in turn: 0 1 2 0 1 2 (``chunks`` per rank)."""
    return tuple(c % stages for c in range(stages * chunks))


def v_placement(stages: int) -> tuple[int, ...]:
    """Two chunks per rank, down and back up: 0 1 2 2 1 0, so that the first rank also holds the loss."""
    return (*range(stages), *reversed(range(stages)))
