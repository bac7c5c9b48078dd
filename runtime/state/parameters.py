"""Converts a module's parameters to DTensors in the placements in which a program stores them.

A plain parameter cannot become a DTensor in place (torch: their slots differ), so :func:`wrap_parameters` replaces
every parameter by a replicated DTensor at once; :func:`place_parameters` later exchanges its content
(``torch.utils.swap_tensors``), so that an optimizer created in between still works and tied weights stay tied. Rank 0's
weights of a real model are broadcast to other ranks, which have different ones if the script does not seed. A meta
model is initialised tensor by tensor (:mod:`autopar.runtime.state.materialise`). Buffers are plain tensors, replicated.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import AutoparError
from autopar.ir.placements import (
    Placements,
    StridedShard,
    UnequalShard,
    before_after,
    local_shape,
    shard_dim,
    take_local,
)
from autopar.ir.program import TensorSlot
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.groups import AxisGroup, MeshGroups
from autopar.runtime.execute.randomness import signed_seed
from autopar.runtime.torch_internals.dtensors import dtensor, local_tensor, strided_shard
from autopar.torch_internals.modules import parameters_of

from .gradient_hooks import carry_hooks, hooks_of, set_hooks
from .param_groups import mark_replaced

# Bytes sent in one broadcast. Chosen: latency is negligible, and a copy takes little memory.
_BUCKET_BYTES = 32 << 20


class Place(Protocol):
    """A mesh of tensors, with this rank's ``coordinate`` there; None if it is not part of it."""

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def coordinate(self) -> tuple[int, ...] | None: ...


# How a parameter is stored, and where.
Stored = tuple[TensorSlot, Place]


def before_when_cut(placements: Placements, axis: int, mesh: Sequence[int]) -> int:
    """``before`` of the shard on ``axis`` if axes are cut from the outermost to the innermost, as
    :func:`autopar.ir.placements.take_local` and torch do."""
    return before_after(placements, axis, mesh, (0,) * len(mesh), range(axis))


def torch_placements(placements: Placements, mesh: Sequence[int]) -> tuple[TorchPlacement, ...]:
    """``placements`` in torch's own classes; a strided shard's ``split_factor`` is
    :func:`before_when_cut`."""
    converted: list[TorchPlacement] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            factor = before_when_cut(placements, axis, mesh)
            converted.append(Shard(placement.dim) if factor == 1 else strided_shard(placement.dim, factor))
        else:
            assert not isinstance(placement, UnequalShard), "parameters are never in unequal shares"
            converted.append(placement)
    return tuple(converted)


def torch_can_gather(placements: Placements, mesh: Sequence[int]) -> bool:
    """Whether torch's ``full_tensor`` of such a DTensor is correct. It is not (2.13: wrong order, or an error) if a
    strided shard is on an axis outside another axis that shards the same dim; :func:`gather_whole` always is."""
    return not any(
        isinstance(outer, StridedShard) and mesh[b] > 1 and shard_dim(placements[b]) == outer.dim
        for a, outer in enumerate(placements)
        if mesh[a] > 1
        for b in range(a + 1, len(placements))
    )


def gather_whole(local: torch.Tensor, slot: TensorSlot, groups: MeshGroups) -> torch.Tensor:
    """The whole tensor of ``slot`` on every rank, from this rank's part ``local``: undoes the cuts from the innermost
    axis outwards. Supports all placements, including partial ones."""
    collectives, count = Collectives(groups), len(groups.shape)
    for axis in reversed(range(count)):
        placement = slot.placements[axis]
        dim = shard_dim(placement)
        if dim is not None:
            outer = (*slot.placements[:axis], *[Replicate()] * (count - axis))
            size = local_shape(slot.shape, outer, groups.shape, groups.coordinate)[dim]
            before = before_when_cut(slot.placements, axis, groups.shape)
            local = collectives.all_gather(local, (axis,), dim, size, before).wait()
        elif isinstance(placement, Partial):
            local = collectives.all_reduce(local, (axis,), placement.reduce_op).wait()
    return local


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor of ``shape``."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def make_dtensor(local: torch.Tensor, slot: TensorSlot, place: Place) -> DTensor:
    """The DTensor of ``slot``, of which this rank has the part ``local`` (empty if it is not part of the mesh). Avoids
    ``DTensor.from_local``, which treats the shape of a scalar, (), as missing."""
    placements = torch_placements(slot.placements, place.shape)
    return dtensor(local, place.mesh, placements, slot.shape, contiguous_stride(slot.shape), local.requires_grad)


def take_own(whole: torch.Tensor, slot: TensorSlot, place: Place) -> torch.Tensor:
    """This rank's part of the global tensor ``whole``: contiguous, and not a view of a larger tensor; empty if the rank
    is not part of the mesh."""
    if place.coordinate is None:
        return whole.new_empty(0)
    local = take_local(whole, slot.placements, place.shape, place.coordinate).contiguous()
    return local.clone() if local.untyped_storage().nbytes() > local.nbytes else local


def broadcast_first(tensors: Sequence[torch.Tensor], groups: MeshGroups) -> Iterator[tuple[int, torch.Tensor]]:
    """Broadcasts all tensors from the mesh's first rank, in buckets of bytes. Yields ``(index, value)``, on the mesh's
    device."""
    group = groups.over(groups.axes)
    bucket: list[int] = []
    for index in range(len(tensors)):
        bucket.append(index)
        if sum(tensors[i].nbytes for i in bucket) >= _BUCKET_BYTES or index + 1 == len(tensors):
            yield from zip(bucket, _broadcast([tensors[i] for i in bucket], group, groups.device), strict=True)
            bucket = []


def _broadcast(tensors: Sequence[torch.Tensor], group: AxisGroup, device: torch.device) -> list[torch.Tensor]:
    here = [tensor.detach().to(device).contiguous() for tensor in tensors]
    if group.group is None:
        return here
    sizes = [tensor.nbytes for tensor in here]
    buffer = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in here])
    dist.broadcast(buffer, group=group.group, group_src=0)
    # Cloned, because offsets of views must be multiples of the itemsize, and so that the bucket can be freed.
    return [
        piece.clone().view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(buffer.split(sizes), here, strict=True)
    ]


def wrap(tensor: torch.Tensor, groups: MeshGroups) -> DTensor:
    """``tensor`` as a replicated DTensor in the same memory, on any device; ``from_local`` would move it to the mesh's
    device."""
    placements = (Replicate(),) * len(groups.shape)
    return dtensor(tensor.detach(), groups.mesh, placements, tensor.shape, tensor.stride())


def wrap_parameters(module: nn.Module, groups: MeshGroups) -> None:
    """Replaces every plain parameter of ``module`` by a replicated DTensor in the same memory, on any device including
    meta; tied parameters by the same DTensor."""
    wrapped: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in parameters_of(part).items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in wrapped:
                wrapped[id(parameter)] = nn.Parameter(wrap(parameter, groups), parameter.requires_grad)
                wrapped[id(parameter)].__dict__.update(parameter.__dict__)
                carry_hooks(parameter, wrapped[id(parameter)])
                mark_replaced(parameter, wrapped[id(parameter)])
            parameters_of(part)[key] = wrapped[id(parameter)]


@contextmanager
def unwrapped(module: nn.Module, *, device: str | None = None) -> Iterator[None]:
    """Replaces the DTensor parameters of ``module`` by their local tensors, as plain parameters, while the context is
    open; by empty ones on ``device``, if that is given, unless they are there."""
    plain: dict[int, nn.Parameter] = {}
    before = [(part, dict(parameters_of(part))) for part in module.modules()]
    for part, parameters in before:
        for key, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                local = local_tensor(parameter)
                if device not in (None, local.device.type):
                    local = torch.empty_like(local, device=device)
                parameters_of(part)[key] = plain.setdefault(id(parameter), nn.Parameter(local, requires_grad=False))
    try:
        yield
    finally:
        for part, parameters in before:
            parameters_of(part).update(parameters)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without the cost or the autograd of ``to_local``; other tensors detached."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def laid_out_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``local``, a gradient, with the strides of this rank's part of ``parameter``, as torch's autograd gives it; those
    of dims of one element are anyone's. Compiled code lays it out as it likes, and the fused optimizers refuse other
    strides than the parameter's."""
    own = local_of(parameter)
    if local.stride() == own.stride() or local.shape != own.shape:
        return local
    if all(n == 1 or a == b for n, a, b in zip(own.shape, local.stride(), own.stride(), strict=True)):
        return local
    return torch.empty_like(own, dtype=local.dtype).copy_(local)


def swap_parameter(parameter: torch.Tensor, replacement: torch.Tensor, name: str) -> None:
    """Gives ``parameter`` the content of ``replacement``, and keeps its identity and attributes. Raises
    :class:`AutoparError` if something else refers to its old content."""
    replacement.__dict__.update(parameter.__dict__)
    parameter.grad = None
    hooks = hooks_of(parameter)
    try:
        torch.utils.swap_tensors(parameter, replacement)
    except RuntimeError:
        gc.collect()
        try:
            torch.utils.swap_tensors(parameter, replacement)
        except RuntimeError as error:
            raise AutoparError(
                f"the parameter {name} cannot become a DTensor in place, because something still "
                "refers to its old content "
                f"(outputs of an earlier call of the plain model?): {error}"
            ) from error
    set_hooks(parameter, hooks)  # Autograd's references to them were swapped with the old content.


def shared_seed(groups: MeshGroups, seed: int | None = None) -> int:
    """The ``seed`` of the mesh's first rank (default: torch's initial seed), as :func:`signed_seed`."""
    own = torch.tensor([signed_seed(torch.initial_seed() if seed is None else seed)], device="cpu")
    return int(next(broadcast_first([own], groups))[1])
