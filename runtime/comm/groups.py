"""Process groups for sets of mesh axes: the devices that differ only on these axes, in row-major order.

Every rank creates the same groups in the same order (programs of one plan have the same collectives), and each group
once per mesh. Axes of one device are ignored, since nothing is sent over them. Invariant: the position in a group is
the row-major order of the mesh coordinates. For one axis that requires that ranks ascend along it, and other meshes are
refused; over several axes of a transposed mesh, such as [[0, 2], [1, 3]], ranks need not ascend.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import OptionsError
from autopar.runtime.torch_internals.collectives import world_timeout
from autopar.runtime.torch_internals.dtensors import without_advice_to_flatten

from .settle_threads import settle_at_exit


class Listener(Protocol):
    """Hears of each collective of an imagined group when it starts: its ``kind``, the reduction ``op`` ("" for none),
    and the ``operand`` as it is handed to the backend."""

    def started(self, kind: str, op: str, operand: torch.Tensor, group: AxisGroup) -> None: ...


@dataclass(frozen=True)
class AxisGroup:
    """The devices that differ from this one only on some axes: ``size`` of them, this one at ``index``. ``group`` is
    None for a single device, or if the group is ``imagined``: then buffers are allocated as that backend needs them,
    and nothing is sent (:mod:`autopar.runtime.rehearse.rehearsal`). ``axes`` are those mesh axes, without axes of one
    device. ``listener`` is told of what an imagined group would send."""

    group: dist.ProcessGroup | None
    size: int
    index: int
    device_type: str = "cpu"
    imagined: str = ""
    axes: tuple[int, ...] = ()
    listener: Listener | None = field(default=None, compare=False)

    @property
    def backend(self) -> str:
        """``gloo``, ``nccl``, ...; ``none`` for a group of one. For a group with a backend per device type, that of the
        mesh's devices."""
        if self.group is None:
            return self.imagined or "none"
        named = dict(part.split(":") for part in str(dist.get_backend_config(self.group)).split(",") if ":" in part)
        return named.get(self.device_type, str(dist.get_backend(self.group)))


class MeshGroups:
    """The process groups of ``mesh``; see the module docstring. Use :func:`mesh_groups`, which creates one per mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise OptionsError(f"rank {dist.get_rank()} is not on the mesh {mesh}; only its ranks may run the model")
        ranks = mesh.mesh
        for axis in range(ranks.ndim):
            if bool((ranks.diff(dim=axis) <= 0).any()):
                raise OptionsError(
                    f"the ranks of the mesh {ranks.tolist()} do not ascend along axis {axis}; "
                    f"order them, for example by init_device_mesh({mesh.device_type!r}, {tuple(ranks.shape)})"
                )
        self.mesh = mesh
        _quieten(mesh)
        self.shape: tuple[int, ...] = tuple(ranks.shape)
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self._by_axes: dict[tuple[int, ...], AxisGroup] = {}
        settle_at_exit()
        self._regrouped: dict[tuple[int, ...], DeviceMesh] = {}

    @property
    def device(self) -> torch.device:
        """The device of this rank: the current device of the mesh's type."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    def over(self, axes: tuple[int, ...]) -> AxisGroup:
        """The group over ``axes`` (outermost first). The first call for a set of axes is collective over the group."""
        live = tuple(axis for axis in axes if self.shape[axis] > 1)
        if live not in self._by_axes:
            self._by_axes[live] = self._make(live)
        return self._by_axes[live]

    def through_cpus(self) -> dist.ProcessGroup:
        """A gloo group of all ranks in row-major order, whatever backend the mesh has. Created once for all meshes of
        these ranks, collectively, since each group has its own threads."""
        ranks = tuple(self.mesh.mesh.flatten().tolist())
        world, group = _CPU_GROUPS.get(ranks, (None, None))
        if group is None or world is not dist.group.WORLD:
            group = self.another_through_cpus()
            _CPU_GROUPS[ranks] = dist.group.WORLD, group
        return group

    def another_through_cpus(self) -> dist.ProcessGroup:
        """A new group as :meth:`through_cpus` gives; collective."""
        return group_in_order(self.mesh.mesh.flatten().tolist(), "gloo")

    def regrouped(self, shape: tuple[int, ...]) -> MeshGroups:
        """The same devices in the same order on a mesh of another ``shape``; created once, collectively. Raises
        :class:`OptionsError` unless :meth:`ascends_on` holds."""
        if shape == self.shape:
            return self
        if shape not in self._regrouped:
            self._regrouped[shape] = DeviceMesh(self.mesh.device_type, self.mesh.mesh.reshape(shape))
        return mesh_groups(self._regrouped[shape])

    def ascends_on(self, shape: tuple[int, ...]) -> bool:
        """Whether :meth:`regrouped` to ``shape``, of as many devices, has ranks that ascend along each axis."""
        ranks = self.mesh.mesh.reshape(shape)
        return all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(ranks.ndim))

    def prepare(self, axis_sets: set[tuple[int, ...]]) -> None:
        """Creates the groups over all ``axis_sets``, in the same order on every rank."""
        for axes in sorted(axis_sets):
            self.over(axes)

    def _make(self, axes: tuple[int, ...]) -> AxisGroup:
        kind = self.mesh.device_type
        if not axes:
            return AxisGroup(None, 1, 0, kind)
        size = math.prod(self.shape[axis] for axis in axes)
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + self.coordinate[axis]
        if len(axes) == 1:
            return AxisGroup(self.mesh.get_group(axes[0]), size, index, kind, axes=axes)
        members = self._members(axes)
        if members == list(range(dist.get_world_size())):
            return AxisGroup(dist.group.WORLD, size, index, kind, axes=axes)
        # Only members call this; ranks outside the mesh need not.
        return AxisGroup(group_in_order(members), size, index, kind, axes=axes)

    def _members(self, axes: tuple[int, ...]) -> list[int]:
        spans = [range(n) if a in axes else [self.coordinate[a]] for a, n in enumerate(self.shape)]
        return [int(self.mesh.mesh[place]) for place in itertools.product(*spans)]


def group_in_order(ranks: Sequence[int], backend: str = "", timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group of ``ranks``, created by them alone, in which each has its place in the list. ``backend``: by default
    that of the world; ``timeout``: by default :func:`world_timeout`. Raises :class:`OptionsError` if torch can only
    sort the ranks: ``sort_ranks`` of ``new_group`` (2.13)."""
    options: dict[str, Any] = {"use_local_synchronization": True}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise OptionsError(
                f"the ranks {list(ranks)} of one group do not ascend, and torch {torch.__version__} would sort them: "
                "order the ranks of the mesh, for example by init_device_mesh(...)"
            )
        options["sort_ranks"] = False
    limit = world_timeout(backend) if timeout is None else timeout
    group: dist.ProcessGroup = dist.new_group(list(ranks), limit, backend or None, **options)
    return group


# Keyed by identity and never dropped, since creating a group again is collective, and ranks collect garbage at
# different times.
_GROUPS: dict[int, MeshGroups] = {}
# By ranks: the world in which a group was created, and the group.
_CPU_GROUPS: dict[tuple[int, ...], tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = {}


def mesh_groups(mesh: DeviceMesh) -> MeshGroups:
    """The one :class:`MeshGroups` of ``mesh`` in this process. Raises :class:`OptionsError` for a rank not on
    the mesh."""
    groups = _GROUPS.get(id(mesh))
    if groups is None or groups.mesh is not mesh:
        groups = _GROUPS[id(mesh)] = MeshGroups(mesh)
    return groups


def adopt_groups(groups: MeshGroups) -> None:
    """Makes ``groups`` those of its mesh, for a subclass."""
    _GROUPS[id(groups.mesh)] = groups


def known_groups(mesh: DeviceMesh) -> MeshGroups | None:
    """The groups of ``mesh`` if they exist."""
    groups = _GROUPS.get(id(mesh))
    return groups if groups is not None and groups.mesh is mesh else None


def mesh_of_one(device_type: str = "cpu", dims: int = 1) -> DeviceMesh:
    """A mesh of only this process; starts torch.distributed without a network if it is not running."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if device_type != "cpu":
        torch.get_device_module(device_type).current_device()  # DeviceMesh warns where no device is in use yet.
    shape = torch.tensor(dist.get_rank(), device="cpu").reshape((1,) * dims)
    return DeviceMesh(device_type, shape)


def _quieten(mesh: DeviceMesh) -> None:
    """Suppresses DTensor's advice to flatten ``mesh``. If several axes shard one dim, ``full_tensor()`` of a parameter
    advises the user to flatten the mesh, so that one gather is enough. The user did not create these DTensors and
    cannot follow the advice, and autopar's own gathers already use one."""
    without_advice_to_flatten(mesh)
