"""Messages between the ranks at one coordinate of all stages, without tags: the k-th send matches the k-th receive.

A message consists of several tensors, sent one after the other; both ends skip empty ones.

NCCL runs the messages of a pair of ranks (or of all, if the group was created for one device) one after the other, in
the order in which they were posted, and a send may wait for its receive. This cannot deadlock: the lists of all ranks
are parts of one sequence in which a message comes after everything that its value depends on. So the first of the
pending messages is at the head of the queues of both its ends, and its value depends on no other of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.comm.waiting import WAITING

from .stage_mesh import StageGroups

# How many messages to one stage may be in flight. Waiting for an older one cannot deadlock, since the schedule would
# also allow waiting for each at its send.
# Chosen: memory for so many messages of a stage.
IN_FLIGHT = 4


@dataclass
class Arrival:
    """Tensors that are in flight or have arrived."""

    tensors: list[torch.Tensor]
    works: Sequence[Any] = ()

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            WAITING.during(work.wait)
        return self.tensors


class Messenger:
    """Sends and receives of one step."""

    def __init__(self, stages: StageGroups) -> None:
        self.stages = stages
        self._sent: dict[int, deque[Arrival]] = {}

    def send(self, tensors: Sequence[torch.Tensor], stage: int) -> None:
        """Starts sending ``tensors`` to the rank of ``stage``; waits only for messages sent there long before."""
        dense = [tensor.contiguous() for tensor in tensors if tensor.numel()]
        works = [dist.isend(tensor, group=self.stages.peers, group_dst=stage) for tensor in dense]
        queue = self._sent.setdefault(stage, deque())
        queue.append(Arrival(dense, works))
        while len(queue) > IN_FLIGHT:
            queue.popleft().wait()

    def receive(self, tensors: list[torch.Tensor], stage: int) -> Arrival:
        """Posts a receive from the rank of ``stage`` into ``tensors``, which must be dense."""
        works = [dist.irecv(t, group=self.stages.peers, group_src=stage) for t in tensors if t.numel()]
        return Arrival(tensors, works)

    def finish(self) -> None:
        """Waits until all messages have been sent."""
        for queue in self._sent.values():
            while queue:
                queue.popleft().wait()
