"""The norm of all gradients of a model, which may be on several meshes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.comm.groups import MeshGroups

from .parameters import local_of


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def copies(gradient: torch.Tensor, groups: MeshGroups) -> int:
    """The number of devices that have each element of a gradient."""
    if not isinstance(gradient, DTensor):
        return math.prod(groups.shape)
    mesh = gradient.device_mesh
    return math.prod(mesh.size(axis) for axis, p in enumerate(gradient.placements) if isinstance(p, Replicate))


def norms(gradients: list[torch.Tensor], groups: MeshGroups, norm_type: float) -> torch.Tensor:
    """The ``norm_type`` norm of each whole gradient of ``gradients``, [number of gradients], on every rank of
    ``groups``; each rank has its part of the gradients. Collective, one message."""
    everyone = groups.over(groups.axes)
    own = torch.stack([_part(local_of(g), copies(g, groups), norm_type).to(groups.device) for g in gradients])
    if everyone.group is not None:
        dist.all_reduce(own, _reduction(norm_type), group=everyone.group)
    return own if math.isinf(norm_type) or norm_type == 0.0 else own.pow(1.0 / norm_type)


def _part(local: torch.Tensor, count: int, norm_type: float) -> torch.Tensor:
    """The contribution of ``local``, one of ``count`` equal copies: the largest or least absolute value, or its share
    of the sum of powers."""
    if not local.numel():
        return torch.full((), math.inf if norm_type == -math.inf else 0.0, device=local.device)
    norm: torch.Tensor = torch.linalg.vector_norm(local, norm_type).float()
    if math.isinf(norm_type):
        return norm
    return (norm if norm_type == 0.0 else norm.pow(norm_type)).div(count)


def _reduction(norm_type: float) -> dist.ReduceOp.RedOpType:
    if math.isinf(norm_type):
        return dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
    return dist.ReduceOp.SUM


def total_norm(gradients: list[torch.Tensor], groups: MeshGroups, norm_type: float) -> torch.Tensor:
    """The norm of all elements of ``gradients`` as one vector. Collective."""
    if not gradients:
        return torch.zeros((), device=groups.device)
    norm: torch.Tensor = torch.linalg.vector_norm(norms(gradients, groups, norm_type), norm_type)
    return norm


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scales ``gradients`` in place so that their ``norm`` is at most ``max_norm``, with torch's formula."""
    # The 1e-6 of torch.nn.utils.clip_grad_norm_.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local = local_of(gradient)
        local.mul_(factor.to(local.device, local.dtype))
