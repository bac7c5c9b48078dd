"""Converts DTensors from and to local tensors without the overhead of the public functions.

``DTensor.from_local`` and ``to_local`` are differentiable, take twice as long, move tensors on another device than the
mesh's, and treat the shape of a scalar, (), as missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from autopar.torch_internals.sharding_rules import DTensorSpec, TensorMeta

__all__ = ["dtensor", "dtensor_like", "local_tensor", "strided_shard", "sub_mesh", "without_advice_to_flatten"]

Made = TypeVar("Made", bound=DTensor)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor of ``tensor`` itself. Relies on ``DTensor._local_tensor`` (2.11)."""
    return tensor._local_tensor


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as a DTensor of the mesh, placements and shape of ``like``. There are hundreds a step, so this leaves
    out ``DTensor.__init__``, which does nothing and takes three times as long. Relies on ``DTensor._spec`` and the
    constructor that takes it (2.11)."""
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)


def is_placed_like(tensor: object, like: DTensor) -> bool:
    """Whether ``tensor`` is a DTensor of the mesh, placements and shape of ``like``. Relies on ``DTensor._spec``
    (2.11)."""
    return type(tensor) is DTensor and (tensor._spec is like._spec or tensor._spec == like._spec)


def subclass_like(cls: type[Made], local: torch.Tensor, like: DTensor) -> Made:
    """:func:`dtensor_like` for a subclass. Relies on the same (2.11)."""
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
    _redistribute_any_strided_shard()
    return StridedShard(dim, split_factor=split_factor)


@cache
def _redistribute_any_strided_shard() -> None:
    """Makes torch 2.11 gather strided shards that are no order of the mesh's axes one axis after the other, as 2.13
    does; 2.11 raises. Relies on ``_gen_transform_infos_non_cached`` of ``_redistribute``, and on 2.13's error there."""
    if hasattr(_redistribute, "_StridedShardNotDecodableError"):
        return
    generate = _redistribute._gen_transform_infos_non_cached

    @wraps(generate)
    def by_axis_if_need_be(source: DTensorSpec, target: DTensorSpec, *options: Any, **named: Any) -> Any:
        try:
            return generate(source, target, *options, **named)
        except ValueError as error:
            if "shard_order" not in str(error):
                raise
            assert source.tensor_meta is not None
            planner = _redistribute.get_redistribute_planner(source.device_mesh, source.tensor_meta)
            return planner.generate_greedy_transform_infos(source, target)

    _redistribute._gen_transform_infos_non_cached = by_axis_if_need_be  # type: ignore[assignment]


def sub_mesh(device_type: str, ranks: torch.Tensor, names: tuple[str, ...] | None) -> DeviceMesh:
    """A mesh without process groups. Relies on the argument ``_init_backend`` (2.11)."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def without_advice_to_flatten(mesh: DeviceMesh) -> None:
    """Suppresses DTensor's advice to flatten axes of ``mesh``. Relies on the set ``_warned_flatten_issues`` of (hash of
    the mesh, axes, reason) in ``_redistribute`` (2.11); does nothing without it."""
    warned = getattr(_redistribute, "_warned_flatten_issues", None)
    if isinstance(warned, set):
        subsets = (s for n in range(2, mesh.ndim + 1) for s in itertools.combinations(range(mesh.ndim), n))
        reasons = ("no_flattened_mesh", "uneven_tensor_shape", "non_ascending_mesh_dims")
        warned.update((hash(mesh), axes, reason) for axes, reason in itertools.product(subsets, reasons))
