"""The meshes of a pipeline: the whole ``(stages, *inside)``, and one inside each stage.

Parameters of a stage are DTensors on the mesh inside it, also on ranks of other stages, where they are empty: torch
supports meshes that a rank is not part of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.groups import MeshGroups, known_groups, mesh_groups
from autopar.runtime.state.parameters import Place
from autopar.runtime.torch_internals.collectives import world_timeout
from autopar.runtime.torch_internals.dtensors import sub_mesh


@dataclass(frozen=True)
class Elsewhere:
    """The mesh inside a stage that this rank is not part of."""

    mesh: DeviceMesh
    shape: tuple[int, ...]
    coordinate: None = None


class StageGroups:
    """The groups of a pipeline. ``whole``: groups of the mesh (stages, \\*inside); ``own``: groups of the mesh inside
    this rank's stage; ``place``: each stage's mesh; ``peers``: a group of the ranks at this coordinate of all stages,
    used only for messages between stages (None if there is one stage). Creating one is collective over the mesh."""

    def __init__(self, whole: MeshGroups) -> None:
        self.whole = whole
        self.stage, self.count = whole.coordinate[0], whole.shape[0]
        inside = whole.shape[1:]
        ranks = whole.mesh.mesh
        names = tuple(f"inside{axis}" for axis in range(len(inside)))
        if self.count == 1:
            self.own = whole.regrouped(inside)
        else:
            axis_groups = [whole.mesh.get_group(axis + 1) for axis in range(len(inside))]
            kind = whole.mesh.device_type
            own = DeviceMesh.from_group(axis_groups, kind, mesh=ranks[self.stage], mesh_dim_names=names)
            self.own = mesh_groups(own)
        self.place: tuple[Place, ...] = tuple(
            self.own if stage == self.stage else Elsewhere(self._other(ranks[stage], names), inside)
            for stage in range(self.count)
        )
        self.ranks: tuple[int, ...] = tuple(int(block[whole.coordinate[1:]]) for block in ranks)
        self.peers = (
            dist.new_group(
                list(self.ranks), world_timeout(), use_local_synchronization=True, group_desc="pipeline messages"
            )
            if self.count > 1
            else None
        )

    def _other(self, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        return sub_mesh(self.whole.mesh.device_type, ranks, names)

    def everywhere(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Broadcasts ``tensor`` from the ranks of ``stage``; on other ranks it is an uninitialised tensor of the same
        shape, which is filled. Collective over the stages."""
        if self.count > 1 and tensor.numel():
            group = self.whole.over((0,))
            dist.broadcast(tensor, group=group.group, group_src=stage)
        return tensor


# By the identity of the groups, as in :mod:`autopar.runtime.comm.groups`. Never dropped, since creating one is
# collective.
_MADE: dict[int, StageGroups] = {}


def stage_meshes(whole: MeshGroups) -> StageGroups:
    """The one :class:`StageGroups` of ``whole`` in this process."""
    if id(whole) not in _MADE:
        _MADE[id(whole)] = StageGroups(whole)
    return _MADE[id(whole)]


def whole_everywhere(tensor: torch.Tensor, groups: MeshGroups) -> torch.Tensor:
    """The whole of a DTensor on every rank of ``groups``, also of another stage; other tensors are returned unchanged.
    Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    ranks = tensor.device_mesh.mesh
    if ranks.numel() == groups.mesh.mesh.numel():
        return _gathered(tensor)
    stage = int((groups.mesh.mesh == ranks.flatten()[0]).nonzero()[0, 0])
    if stage == groups.coordinate[0]:
        whole = _gathered(tensor).contiguous()
    else:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=groups.device)
    return stage_meshes(groups).everywhere(whole, stage)


def _gathered(tensor: DTensor) -> torch.Tensor:
    """The whole of ``tensor`` on every rank of its mesh. If several axes shard one dim evenly this takes one gather
    over all of them, where DTensor takes one per axis."""
    mesh, groups = tensor.device_mesh, known_groups(tensor.device_mesh)
    axes = tuple(a for a, p in enumerate(tensor.placements) if mesh.size(a) > 1 and not p.is_replicate())
    placements = {tensor.placements[axis] for axis in axes}
    first = next(iter(placements), None)
    if groups is None or len(axes) < 2 or len(placements) > 1 or type(first) is not Shard:
        return tensor.full_tensor()
    size = tensor.shape[first.dim]
    if size % math.prod(mesh.size(axis) for axis in axes):
        return tensor.full_tensor()
    whole: torch.Tensor = Collectives(groups).all_gather(tensor.to_local(), axes, first.dim, size).wait()
    return whole
