"""The norm of all gradients of a model that may lie on several meshes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from .groups import MeshGroups
from .parameters import local_of


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients there are."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def copies(gradient: torch.Tensor, groups: MeshGroups) -> int:
    """On how many devices each element of a gradient lies."""
    if not isinstance(gradient, DTensor):
        return math.prod(groups.shape)
    mesh = gradient.device_mesh
    return math.prod(mesh.size(axis) for axis, p in enumerate(gradient.placements) if isinstance(p, Replicate))


def total_norm(gradients: list[torch.Tensor], groups: MeshGroups, norm_type: float) -> torch.Tensor:
    """The ``norm_type`` norm of all elements of ``gradients`` as one vector, on every rank of ``groups``, where each
    rank has its part of them. Collective."""
    everyone, device = groups.over(groups.axes), groups.device
    locals_ = [(local_of(gradient), copies(gradient, groups)) for gradient in gradients]
    norms = [
        torch.linalg.vector_norm(local, norm_type).to(device, torch.float32) / _share(count, norm_type)
        for local, count in locals_
        if local.numel()
    ]
    own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    if everyone.group is None:
        return own
    if math.isinf(norm_type):
        dist.all_reduce(own, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group=everyone.group)
        return own
    power = own**norm_type
    dist.all_reduce(power, group=everyone.group)
    return power ** (1.0 / norm_type)


def _share(count: int, norm_type: float) -> float:
    """What to divide a norm by so that ``count`` equal copies together count as one."""
    return 1.0 if math.isinf(norm_type) else count ** (1.0 / norm_type)


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scales ``gradients`` in place so that their ``norm`` is at most ``max_norm``, as torch does it."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local = local_of(gradient)
        local.mul_(factor.to(local.device, local.dtype))
