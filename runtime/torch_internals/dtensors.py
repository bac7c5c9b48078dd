"""DTensors from and to the local tensor, without what the public functions add.

``DTensor.from_local`` and ``to_local`` are differentiable, take twice as long, move what lies on another device than
the mesh, and take the shape of a number, (), for none given.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from autopar.torch_internals.sharding_rules import DTensorSpec, TensorMeta

__all__ = ["dtensor", "dtensor_like", "local_tensor", "strided_shard", "sub_mesh", "without_advice_to_flatten"]

Made = TypeVar("Made", bound=DTensor)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """What this rank holds of ``tensor``: the very tensor. Relies on ``DTensor._local_tensor`` (2.11)."""
    return tensor._local_tensor


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as a DTensor of the mesh, placements and shape of ``like``. Relies on ``DTensor._spec`` and the
    constructor that takes it (2.11)."""
    return DTensor(local, like._spec, requires_grad=False)


def subclass_like(cls: type[Made], local: torch.Tensor, like: DTensor) -> Made:
    """As :func:`dtensor_like`, of a class of one's own. Relies on the same (2.11)."""
    return cls(local, like._spec, requires_grad=False)


def dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool = False,
) -> DTensor:
    """``local`` as this rank's part of a DTensor of global ``shape`` and ``stride``. Relies on ``DTensorSpec`` and
    ``DTensor``'s constructor (2.11)."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=requires_grad)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A shard of each of ``split_factor`` parts of ``dim``. Relies on ``_StridedShard`` (2.11)."""
    return StridedShard(dim, split_factor=split_factor)


def sub_mesh(device_type: str, ranks: torch.Tensor, names: tuple[str, ...] | None) -> DeviceMesh:
    """A mesh for which no process groups are made. Relies on the argument ``_init_backend`` (2.11)."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def without_advice_to_flatten(mesh: DeviceMesh) -> None:
    """Marks DTensor's advice to flatten axes of ``mesh`` as given. Relies on the set ``_warned_flatten_issues`` of
    (hash of the mesh, axes, reason) that ``_redistribute`` keeps (2.11); nothing is done where there is none."""
    known = getattr(_redistribute, "_warned_flatten_issues", None)
    if isinstance(known, set):
        subsets = (s for n in range(2, mesh.ndim + 1) for s in itertools.combinations(range(mesh.ndim), n))
        reasons = ("no_flattened_mesh", "uneven_tensor_shape", "non_ascending_mesh_dims")
        known.update((hash(mesh), axes, reason) for axes, reason in itertools.product(subsets, reasons))
