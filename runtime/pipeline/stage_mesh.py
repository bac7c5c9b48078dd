"""The meshes of a pipeline: the whole, which is ``(stages, *inside)`` where stages have equal meshes and one axis of
all devices otherwise, and one inside each stage.

Parameters of a stage are DTensors on the mesh inside it, also on ranks of other stages, where they are empty: torch
supports meshes that a rank is not part of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.ir.stage_meshes import StageMeshes
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
    """The groups of a pipeline. ``whole``: groups of the mesh of all devices; ``own``: groups of the mesh inside this
    rank's stage; ``place``: each stage's mesh; ``peers``: a group used only for messages between stages, of the ranks
    that this one exchanges any with: those at its coordinate of all stages or, of unequal stages, all (None if there is
    one stage). Creating one is collective over the mesh."""

    def __init__(self, whole: MeshGroups, meshes: StageMeshes) -> None:
        self.whole, self.meshes, self.count = whole, meshes, meshes.stages
        ranks = whole.mesh.mesh.flatten()
        index = int((ranks == dist.get_rank()).nonzero()[0, 0])
        self.stage, coordinate = meshes.place(index)
        blocks = [ranks[meshes.ranks(s).start : meshes.ranks(s).stop].reshape(m) for s, m in enumerate(meshes.meshes)]
        names = tuple(f"inside{axis}" for axis in range(len(coordinate)))
        if self.count == 1:
            self.own = whole.regrouped(meshes.meshes[0])
        else:
            axis_groups = self._axis_groups(blocks[self.stage], coordinate)
            kind = whole.mesh.device_type
            own = DeviceMesh.from_group(axis_groups, kind, mesh=blocks[self.stage], mesh_dim_names=names)
            self.own = mesh_groups(own)
        self.place: tuple[Place, ...] = tuple(
            self.own if stage == self.stage else Elsewhere(self._other(block, names), tuple(block.shape))
            for stage, block in enumerate(blocks)
        )
        self._blocks = tuple(tuple(map(int, block.flatten())) for block in blocks)
        exchanging = map(int, ranks) if not meshes.are_equal else (int(block[coordinate]) for block in blocks)
        # As torch orders the ranks of a group.
        self.ranks: tuple[int, ...] = tuple(sorted(exchanging))
        self.peers = (
            dist.new_group(
                list(self.ranks), world_timeout(), use_local_synchronization=True, group_desc="pipeline messages"
            )
            if self.count > 1
            else None
        )

    def _axis_groups(self, block: torch.Tensor, coordinate: tuple[int, ...]) -> list[dist.ProcessGroup]:
        """The group of each axis inside this stage: those of the whole mesh, if that has the axis."""
        if self.meshes.are_equal:
            return [self.whole.mesh.get_group(axis + 1) for axis in range(len(coordinate))]
        groups = []
        for axis, size in enumerate(block.shape):
            line = product(*(range(size) if other == axis else [at] for other, at in enumerate(coordinate)))
            members = [int(block[place]) for place in line]
            groups.append(dist.new_group(members, world_timeout(), use_local_synchronization=True))
        return groups

    def _other(self, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        return sub_mesh(self.whole.mesh.device_type, ranks, names)

    def peer(self, stage: int, device: int) -> int:
        """The place in ``peers`` of a device of a stage. Where stages are equal, it must be this rank's counterpart."""
        return self.ranks.index(self._blocks[stage][device])

    @property
    def index(self) -> int:
        """The place of this rank among the devices of its stage."""
        return self._blocks[self.stage].index(dist.get_rank())

    def everywhere(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Broadcasts ``tensor`` from the ranks of ``stage``; on other ranks it is an uninitialised tensor of the same
        shape, which is filled. Collective over the stages."""
        return _from_rank(tensor, self.whole, self._blocks[stage][0]) if self.count > 1 else tensor


def _from_rank(tensor: torch.Tensor, whole: MeshGroups, rank: int) -> torch.Tensor:
    """Broadcasts ``tensor`` from the stage whose first rank is ``rank``: on the axis of the stages each of its devices
    to its counterparts, on a single axis that first one to all."""
    if tensor.numel():
        group = whole.over((0,))
        dist.broadcast(tensor, group=group.group, group_src=int((whole.mesh.mesh == rank).nonzero()[0, 0]))
    return tensor


# By the identity of the groups, as in :mod:`autopar.runtime.comm.groups`, and the meshes. Never dropped, since creating
# one is collective.
_MADE: dict[tuple[int, StageMeshes], StageGroups] = {}


def stage_meshes(whole: MeshGroups, meshes: StageMeshes) -> StageGroups:
    """The one :class:`StageGroups` of ``meshes`` on ``whole`` in this process."""
    key = id(whole), meshes
    if key not in _MADE:
        _MADE[key] = StageGroups(whole, meshes)
    return _MADE[key]


def whole_everywhere(tensor: torch.Tensor, groups: MeshGroups) -> torch.Tensor:
    """The whole of a DTensor on every rank of ``groups``, also of another stage; other tensors are returned unchanged.
    Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    ranks = tensor.device_mesh.mesh
    if ranks.numel() == groups.mesh.mesh.numel():
        return _gathered(tensor)
    if tensor.device_mesh.get_coordinate() is not None:
        whole = _gathered(tensor).contiguous()
    else:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=groups.device)
    return _from_rank(whole, groups, int(ranks.flatten()[0]))


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
