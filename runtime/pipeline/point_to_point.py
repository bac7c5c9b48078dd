"""Messages between the ranks of one coordinate of all stages, without tags: the k-th send matches the k-th receive.

A message is some tensors, sent one behind the other; empty ones are left out, at both ends.

NCCL runs the messages of a pair of ranks (or of all, if the group was made for one device) one after the other, in
the order in which they were posted, and a send may wait for its receive. That cannot deadlock: all lists of a schedule
are parts of one sequence in which a message stands behind everything its value depends on, so that of the messages not
yet through the first has both its ends at the head of their queues, and its value is made without any other of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .stage_mesh import StageGroups

# Messages to one stage whose tensors are kept while more are sent. Waiting for an older one cannot stall, since the
# schedule could wait for each where it is sent.
# Chosen: memory for so many messages of a stage.
IN_FLIGHT = 4


@dataclass
class Arrival:
    """Tensors that are on their way, or there."""

    tensors: list[torch.Tensor]
    works: Sequence[Any] = ()

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


class Messenger:
    """Sends and receives of one step."""

    def __init__(self, stages: StageGroups) -> None:
        self.stages = stages
        self._sent: dict[int, deque[Arrival]] = {}

    def send(self, tensors: Sequence[torch.Tensor], stage: int) -> None:
        """Starts sending ``tensors`` to the rank of ``stage``; waits only for what was sent there long before."""
        dense = [tensor.contiguous() for tensor in tensors if tensor.numel()]
        works = [dist.isend(tensor, group=self.stages.peers, group_dst=stage) for tensor in dense]
        queue = self._sent.setdefault(stage, deque())
        queue.append(Arrival(dense, works))
        while len(queue) > IN_FLIGHT:
            queue.popleft().wait()

    def receive(self, tensors: list[torch.Tensor], stage: int) -> Arrival:
        """Posts the receive of what the rank of ``stage`` sends into ``tensors``, which must be dense."""
        works = [dist.irecv(t, group=self.stages.peers, group_src=stage) for t in tensors if t.numel()]
        return Arrival(tensors, works)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        for queue in self._sent.values():
            while queue:
                queue.popleft().wait()
