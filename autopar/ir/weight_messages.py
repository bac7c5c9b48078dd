"""Messages in which small weights are gathered together.

A weight that is stored in shards is gathered for each pass that uses it. A small one takes hardly longer to send than a
message takes to begin, so the small weights of a pass travel in messages of several: each is sent when the first of its
members is needed, and holds those that are needed next until it is full. Large weights, whose bytes take the time, are
gathered one by one, which needs no copies into a message and out of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .graph import Graph
from .node import TensorType, Value

# Bytes of gathered weights at which a message is full.
# Chosen: the traffic of one takes as long as it does to begin, with eight A100 (31 us each).
MESSAGE_BYTES = 4 << 20
# Bytes of the largest weight that is sent in a message.
# Chosen: copying it twice costs a twentieth of a message's latency, on A100 and on gloo.
SMALL_BYTES = 1 << 20
# A message is full at this part of all weights at the latest, since two are in memory at once. (It is closed behind the
# weight that fills it, and a small rest joins it, so one of a tiny model may have up to half of them.)
# Chosen: as much as a block of a model of four, which FSDP2 gathers at once.
LEAST_MESSAGES = 4

Item = TypeVar("Item")


@dataclass(frozen=True)
class WeightMessages:
    """``limit``: the bytes of unsharded weights at which a message is full; 0: there are none. ``small``: by phase, the
    bytes of all weights that messages may hold."""

    limit: int = 0
    small: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph) -> WeightMessages:
        """The messages of a step of ``graph``, if all of its small weights are gathered over the same axes."""
        return graph.once(WeightMessages, lambda: WeightMessages._of(graph))

    @staticmethod
    def _of(graph: Graph) -> WeightMessages:
        nodes, users = graph.placeholders("param"), graph.users
        found, small = WeightMessages.full_at(node.type for node in nodes), Counter[str]()
        for node in nodes:
            if found.takes(node.type):
                for phase in {user.phase for user, _ in users.get(Value(node.name), ())}:
                    small[phase] += int(node.type.bytes)
        return WeightMessages(found.limit, dict(small))

    @staticmethod
    def full_at(weights: Iterable[TensorType]) -> WeightMessages:
        """The messages of a model of so many ``weights``, of which nothing is known by phase."""
        return WeightMessages(min(MESSAGE_BYTES, sum(int(kind.bytes) for kind in weights) // LEAST_MESSAGES))

    def takes(self, kind: TensorType) -> bool:
        """Whether a weight of global type ``kind`` travels with others."""
        return 0 < int(kind.bytes) <= min(SMALL_BYTES, self.limit)

    def message_bytes(self, kind: TensorType, nbytes: int, phase: str) -> float:
        """Bytes of the message in which ``nbytes`` of a small weight are sent in ``phase``, if the others send the same
        share of theirs."""
        others = self.small.get(phase, 0) / int(kind.bytes)
        return min(float(self.limit), nbytes * max(1.0, others))


def filled(gathers: Iterable[Item], limit: int, size: Callable[[Item], int]) -> list[list[Item]]:
    """Messages of at least ``limit`` bytes, in order. A rest of less than a quarter of that joins the last of them.

    >>> filled([3, 2, 4, 1], 5, int)
    [[3, 2], [4, 1]]
    >>> filled([3, 2, 1], 5, int)
    [[3, 2, 1]]
    """

    def total(members: Iterable[Item]) -> int:
        return sum(map(size, members))

    messages: list[list[Item]] = [[]]
    for gather in gathers:
        if total(messages[-1]) >= limit:
            messages.append([])
        messages[-1].append(gather)
    if len(messages) > 1 and total(messages[-1]) * 4 < limit:
        messages[-2:] = [messages[-2] + messages[-1]]
    return messages
