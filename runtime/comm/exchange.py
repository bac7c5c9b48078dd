"""Small messages between all ranks of a mesh, outside of programs, with which ranks agree before they compute.

They are sent between CPUs also for a mesh of GPUs, so that no rank waits for pending work of its GPU; and in a group of
their own: if a rank is in another collective meanwhile, gloo would take the one's messages for the other's, and abort
the process where their sizes differ.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .groups import MeshGroups
from .waiting import WAITING


class Exchange:
    """Exchanges between all ranks of a mesh, ``ranks`` in row-major order. Creating the first one for these ranks is
    collective, and so is each method. ``apart``: in a group that no other exchange uses, so that a rank that takes part
    in another one meanwhile cannot be misunderstood; each is then created collectively."""

    def __init__(self, groups: MeshGroups, apart: bool = False) -> None:
        self.ranks: tuple[int, ...] = tuple(groups.mesh.mesh.flatten().tolist())
        everyone = groups.over(groups.axes)
        self.index = everyone.index
        self._group = None
        if everyone.group is not None:
            self._group = groups.another_through_cpus() if apart else groups.through_cpus()

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return len(self.ranks) == 1

    def all_bytes(self, own: bytes) -> list[bytes]:
        """The bytes of each rank, all of one length, in the order of ``ranks``."""
        if self.alone:
            return [own]
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in self.ranks]
        WAITING.during(lambda: dist.all_gather(received, sent, group=self._group))
        return [bytes(piece.numpy()) for piece in received]

    def all_objects(self, own: Any) -> list[Any]:
        """The objects of each rank, which must be picklable, in the order of ``ranks``."""
        if self.alone:
            return [own]
        received: list[Any] = [None] * len(self.ranks)
        WAITING.during(lambda: dist.all_gather_object(received, own, group=self._group))
        return received
