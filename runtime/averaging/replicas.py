"""The replicas of a mesh: each index of its outermost axis has a whole model, on the inner axes."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.comm.groups import AxisGroup, MeshGroups, adopt_groups

from .members import Members


@dataclass(frozen=True)
class Replicas:
    """``whole``: the groups of the mesh (replicas, \\*inside); ``own``: those of the mesh inside this replica;
    ``peers``: the ranks at this rank's coordinate of all replicas, which hold the same shards; ``members``: the
    replicas that are left of them."""

    whole: MeshGroups
    own: MeshGroups
    peers: AxisGroup
    members: Members

    @property
    def count(self) -> int:
        return self.members.count

    @property
    def index(self) -> int:
        """Of this rank's replica, among those that are left."""
        return self.members.index

    @staticmethod
    def of(whole: MeshGroups) -> Replicas:
        """The replicas along the outermost axis of ``whole``. Collective. A mesh of one axis has replicas of one
        device each."""
        if len(whole.shape) == 1:
            whole = whole.regrouped((*whole.shape, 1))
        peers = whole.over((0,))
        return Replicas(whole, _inside(whole), peers, Members(peers.index, tuple(range(peers.size))))


class _ReplicaGroups(MeshGroups):
    """The groups inside a replica. Replicas are arranged anew together, since creating a mesh is collective over all
    ranks."""

    def __init__(self, whole: MeshGroups, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._whole = whole

    def regrouped(self, shape: tuple[int, ...]) -> MeshGroups:
        if shape == self.shape:
            return self
        return _inside(self._whole.regrouped((self._whole.shape[0], *shape)))


# By the identity of the groups of the whole mesh, as in :mod:`autopar.runtime.comm.groups`.
_INSIDE: dict[int, _ReplicaGroups] = {}


def _inside(whole: MeshGroups) -> MeshGroups:
    """The groups of the mesh inside this rank's replica; created once for ``whole``."""
    if id(whole) not in _INSIDE:
        axes = range(1, len(whole.shape))
        names = tuple(f"inside{axis}" for axis in axes)
        axis_groups = [whole.mesh.get_group(axis) for axis in axes]
        ranks = whole.mesh.mesh[whole.coordinate[0]]
        mesh = DeviceMesh.from_group(axis_groups, whole.mesh.device_type, mesh=ranks, mesh_dim_names=names)
        groups = _ReplicaGroups(whole, mesh)
        adopt_groups(groups)
        _INSIDE[id(whole)] = groups
    return _INSIDE[id(whole)]
