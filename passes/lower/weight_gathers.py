"""Which weights a phase gathers together, in one message (:mod:`autopar.ir.weight_messages`).

Weights join messages in the order of their first use, those gathered over the same axes the same message, until it is
full. A message is sent at the first use of any of its members, and each of these is in memory until its last use; with
overlap, the next message is as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Phase, TensorType, Value
from autopar.ir.placements import Placements, Strategy
from autopar.ir.reshard import Hop
from autopar.ir.weight_messages import WeightMessages, filled


@dataclass(frozen=True, slots=True)
class Gather:
    """One weight of global type ``kind`` on its way to ``target`` along ``path``."""

    value: Value
    target: Placements
    kind: TensorType
    path: tuple[Hop, ...]

    @property
    def way(self) -> tuple[object, ...]:
        """What members of a message have in common."""
        return tuple((hop.collective.kind, hop.collective.axes) for hop in self.path if hop.collective)

    @property
    def bytes(self) -> int:
        """Bytes of the weight when it is gathered."""
        return next(hop.collective.bytes for hop in reversed(self.path) if hop.collective)


class Moves(Protocol):
    """What of :class:`.lower.Lowering` this module asks for."""

    @property
    def graph(self) -> Graph: ...
    @property
    def assignment(self) -> Assignment: ...
    @property
    def messages(self) -> WeightMessages: ...
    def strategy(self, node: Node) -> Strategy: ...
    def moved(self, value: Value, target: Placements, phase: Phase) -> tuple[Hop, ...]: ...


Messages = Mapping[tuple[Value, Placements], tuple[Gather, ...]]


def gathered_together(job: Moves, nodes: Iterable[Node], phase: Phase, early: Set[str] = frozenset()) -> Messages:
    """The messages of two or more weights that ``nodes``, which run in this order in ``phase``, read: for each of their
    members all of them. What nodes in ``early`` read does not share a message with what only others do."""
    gathers: dict[tuple[Value, Placements], Gather] = {}
    urgent: set[tuple[Value, Placements]] = set()
    for node in nodes:
        for gather in _read_by(job, node, phase):
            key = gather.value, gather.target
            gathers.setdefault(key, gather)
            if node.name in early:
                urgent.add(key)
    groups: dict[object, list[Gather]] = {}
    for key, gather in gathers.items():
        groups.setdefault((gather.way, key in urgent), []).append(gather)
    messages = (members for group in groups.values() for members in filled(group, job.messages.limit, _bytes))
    return {(g.value, g.target): tuple(members) for members in messages if len(members) > 1 for g in members}


def _bytes(gather: Gather) -> int:
    return gather.bytes


def _read_by(job: Moves, node: Node, phase: Phase) -> Iterator[Gather]:
    """The gathers of small weights that ``node`` reads."""
    for value, target in zip(node.operands, job.strategy(node).inputs, strict=True):
        place = job.assignment.parameters.get(value.node)
        if place is None or place.weight == target:
            continue
        kind = job.graph.type_of(value)
        if job.messages.takes(kind):
            path = job.moved(value, target, phase)
            if any(hop.kind == "all_gather" for hop in path):
                yield Gather(value, target, kind, path)
