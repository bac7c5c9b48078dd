"""Messages between the ranks of all stages, without tags: between two ranks the k-th send matches the k-th receive.

A message consists of several tensors, and a tensor of pieces for or from the ranks of the other stage, one after the
other; between equal meshes it is one piece, the local tensor (:mod:`autopar.ir.wire_pieces`).

NCCL runs the messages of a pair of ranks (or of all, if the group was created for one device) one after the other, in
the order in which they were posted, and a send may wait for its receive. This cannot deadlock: the lists of all ranks
are parts of one sequence in which a message comes after everything that its value depends on. So the first of the
pending messages is at the head of the queues of both its ends, and its value depends on no other of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.placements import coordinate_of, local_shape
from autopar.ir.wire_pieces import Box, Layout, wire_pieces
from autopar.runtime.comm.waiting import WAITING

from .stage_mesh import StageGroups

# How many messages to one stage may be in flight. Waiting for an older one cannot deadlock, since the schedule would
# also allow waiting for each at its send.
# Chosen: memory for so many messages of a stage.
IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A part of a local tensor that is sent to or received from ``device`` of another stage; ``box`` is None for all of
    it."""

    device: int
    box: Box | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim, (start, length) in enumerate(self.box or ()):
            tensor = tensor.narrow(dim, start, length)
        return tensor


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one rank has of a tensor that crosses between stages: its local ``shape``, and the ``pieces`` of that."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[LocalPiece, ...]

    @staticmethod
    def of(
        shape: tuple[int, ...], dtype: torch.dtype, own: Layout, other: Layout, device: int, *, sends: bool
    ) -> Crossing:
        """Of a tensor of global ``shape``, which ``device`` of the one stage sends to the other, or receives."""
        local = local_shape(shape, own.placements, own.mesh, coordinate_of(device, own.mesh))
        pieces = []
        for piece in wire_pieces(shape, own, other) if sends else wire_pieces(shape, other, own):
            if device == (piece.sender if sends else piece.receiver):
                box = piece.sent if sends else piece.received
                is_whole = all(length == size for (_, length), size in zip(box, local, strict=True))
                pieces.append(LocalPiece(piece.receiver if sends else piece.sender, None if is_whole else box))
        return Crossing(local, dtype, tuple(pieces))


@dataclass
class Arrival:
    """Tensors that are in flight or have arrived. ``parts``: pieces that arrive apart, and where they belong."""

    tensors: list[torch.Tensor]
    works: Sequence[Any] = ()
    parts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            WAITING.during(work.wait)
        for place, part in self.parts:
            place.copy_(part)
        return self.tensors


class Messenger:
    """Sends and receives of one step."""

    def __init__(self, stages: StageGroups) -> None:
        self.stages = stages
        self._sent: dict[int, deque[Arrival]] = {}

    def send(self, tensors: Sequence[torch.Tensor], crossings: Sequence[Crossing], stage: int) -> None:
        """Starts sending ``tensors`` to the ranks of ``stage``; waits only for messages sent there long before."""
        dense, works = list[torch.Tensor](), list[Any]()
        for tensor, crossing in zip(tensors, crossings, strict=True):
            for piece in crossing.pieces:
                dense.append(piece.of(tensor).contiguous())
                peer = self.stages.peer(stage, piece.device)
                works.append(dist.isend(dense[-1], group=self.stages.peers, group_dst=peer))
        queue = self._sent.setdefault(stage, deque())
        queue.append(Arrival(dense, works))
        while len(queue) > IN_FLIGHT:
            queue.popleft().wait()

    def receive(self, crossings: Sequence[Crossing], stage: int) -> Arrival:
        """Posts receives from the ranks of ``stage``."""
        device, arrival = self.stages.own.device, Arrival([])
        works = list[Any]()
        for crossing in crossings:
            tensor = torch.empty(crossing.shape, dtype=crossing.dtype, device=device)
            arrival.tensors.append(tensor)
            for piece in crossing.pieces:
                place = piece.of(tensor)
                buffer = (
                    place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
                )
                if buffer is not place:
                    arrival.parts.append((place, buffer))
                peer = self.stages.peer(stage, piece.device)
                works.append(dist.irecv(buffer, group=self.stages.peers, group_src=peer))
        arrival.works = works
        return arrival

    def finish(self) -> None:
        """Waits until all messages have been sent."""
        for queue in self._sent.values():
            while queue:
                queue.popleft().wait()
