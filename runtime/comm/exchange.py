"""Small messages between all ranks of a mesh, outside of any program: what ranks must agree on before they compute.

They are sent through processors also where the mesh is one of GPUs, so that no rank waits for what its GPU has still
to do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .groups import MeshGroups


class Exchange:
    """All ranks of a mesh, ``ranks`` in row-major order. Making the first one of these ranks is collective, and so is
    each method."""

    def __init__(self, groups: MeshGroups) -> None:
        self.ranks: tuple[int, ...] = tuple(groups.mesh.mesh.flatten().tolist())
        everyone = groups.over(groups.axes)
        self.index = everyone.index
        self._group = everyone.group
        if self._group is not None and "gloo" not in str(dist.get_backend_config(self._group)):
            self._group = groups.through_processors()

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return len(self.ranks) == 1

    def all_bytes(self, own: bytes) -> list[bytes]:
        """What each rank gives, all of one length, in the order of ``ranks``."""
        if self.alone:
            return [own]
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in self.ranks]
        dist.all_gather(received, sent, group=self._group)
        return [bytes(piece.numpy()) for piece in received]

    def all_objects(self, own: Any) -> list[Any]:
        """What each rank gives, anything that pickles, in the order of ``ranks``."""
        if self.alone:
            return [own]
        received: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(received, own, group=self._group)
        return received
