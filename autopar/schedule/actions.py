"""The elements of a pipeline schedule: actions, the messages they send, and edges between chunks.

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
``step``                   waits for every reduction and sums the gradients of weights that several ranks hold; last
=========================  ==========================================================================================

**What messages mean.** Sends are asynchronous (``isend``). Receives are posted at their position in the list
(``irecv``); the action that uses the value waits for it. Messages from one rank to another carry no tag: the k-th send
matches the k-th receive, whichever edge, direction or microbatch each names. A list that follows this rule, and that
cannot stall even if every send waits for its receive (:mod:`autopar.schedule.check` proves both), runs on buffered and
on unbuffered transports alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    """An edge: the chunk ``target`` uses a value that ``source`` computes. ``gradient``: it also sends its gradient
    back."""

    source: int
    target: int
    gradient: bool = True


class Message(NamedTuple):
    """A message from the chunk ``source`` to the chunk ``target``: a value (``"forward"``), or a gradient
    (``"backward"``)."""

    direction: Literal["forward", "backward"]
    source: int
    target: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Action:
    """One entry in the list of a pipeline rank: it computes, sends, receives, reduces or ends the step.

    ``chunk`` is held by that rank (-1 for ``step``); ``microbatch`` is -1 for ``reduce`` and ``step``; ``peer`` is the
    chunk at the other end of a message, otherwise -1."""

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
        """The message of a send or receive. It is equal at both ends."""
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
