"""Joins samples that each rank has read to one global batch.

A batch that was read in parts is a DTensor placed ``Shard(0)`` on every axis: the global batch is the ranks' samples,
one rank after the other. This needs no plan, so a batch may be read before there is one. If a program reads a part of
the batch that this rank did not read (the whole batch under tensor parallelism, or a piece of each sample's sequence),
it is cut from an all-gather over the ranks that have it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import InputMismatchError, OptionsError
from autopar.ir.node import TensorType
from autopar.ir.placements import Placements, shard_dim, take_local
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.state.parameters import contiguous_stride
from autopar.runtime.torch_internals.dtensors import local_tensor

SHARD_0 = Shard(0)


def join(
    names: Sequence[str], leaves: Sequence[Any], groups: MeshGroups, exchange: Exchange, copies: int = 1
) -> list[Any]:
    """Replaces each tensor of ``leaves``, which has the rank's samples along dim 0, by a DTensor of the samples of all
    ranks. Tensors without dims, DTensors and non-tensors are the same on every rank, and stay unchanged.

    ``copies``: how many neighbouring ranks have the same samples; only those of the first are used. Collective. Raises
    :class:`InputMismatchError`, on every rank, if tensors of ranks differ in more than their number of samples.
    """
    places = [place for place, leaf in enumerate(leaves) if _is_local(leaf)]
    own = [leaves[place] for place in places]
    for place in places:
        _check_joinable(names[place], leaves[place])
    sizes = _sizes([names[place] for place in places], own, exchange)
    joined = list(leaves)
    for place, tensor, each in zip(places, own, sizes, strict=True):
        joined[place] = _joined(tensor.detach().to(groups.device), each, copies, groups)
    return joined


def _is_local(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0


def _check_joinable(name: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise OptionsError(
            f"input {name} requires a gradient, which inputs that ranks read for themselves cannot have: pass the "
            "global batch to model(...) on every rank"
        )


def _sizes(names: Sequence[str], tensors: Sequence[torch.Tensor], exchange: Exchange) -> list[tuple[int, ...]]:
    """The number of samples of each tensor on each rank."""
    kinds = tuple((name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in zip(names, tensors, strict=True))
    sizes = tuple(int(tensor.shape[0]) for tensor in tensors)
    first = sizes[0] if len(set(sizes)) == 1 else -1
    digest = hashlib.sha256(repr(kinds).encode()).digest()[:16]
    everyone = exchange.all_bytes(digest + struct.pack("q", first))
    counts = [struct.unpack("q", record[16:])[0] for record in everyone]
    if len({record[:16] for record in everyone}) > 1:
        own = {name: str(TensorType(tuple(t.shape), t.dtype)) for name, t in zip(names, tensors, strict=True)}
        raise InputMismatchError(_explain(exchange.ranks, exchange.all_objects(own)))
    if -1 not in counts:
        return [tuple(counts)] * len(tensors)
    every = exchange.all_objects(sizes)
    return [tuple(of_rank[place] for of_rank in every) for place in range(len(tensors))]


def _explain(ranks: Sequence[int], everyone: Sequence[dict[str, str]]) -> str:
    lines = []
    for rank, own in zip(ranks, everyone, strict=True):
        lines.append(f"\n  rank {rank}: {', '.join(f'{name} {kind}' for name, kind in own.items()) or 'no tensors'}")
    return (
        f"the samples of the ranks cannot be joined along dim 0:{''.join(lines)}\n"
        "Give the same inputs on every rank, of the same dtypes, and of the same shapes but for dim 0 (pad sequences "
        "to one length on all ranks: a fixed one, say)"
    )


def _joined(own: torch.Tensor, sizes: tuple[int, ...], copies: int, groups: MeshGroups) -> DTensor:
    """The DTensor of the samples of all ranks; ``sizes``: the number of samples of each rank."""
    if copies == 1 and len(set(sizes)) == 1 and sizes[0] > 0:
        return _dtensor(own.contiguous(), SHARD_0, (own.shape[0] * len(sizes), *own.shape[1:]), groups)
    longest = max(sizes)
    if longest == 0:
        return whole_dtensor(own, groups)
    padded = torch.cat([own, own.new_zeros((longest - own.shape[0], *own.shape[1:]))])
    pieces = Collectives(groups).all_gather(padded, groups.axes, 0, longest * len(sizes)).wait().split(longest)
    samples = [piece[:size] for piece, size in zip(pieces, sizes, strict=True)][::copies]
    return whole_dtensor(torch.cat(samples), groups)


def whole_dtensor(tensor: torch.Tensor, groups: MeshGroups) -> DTensor:
    """``tensor`` as a replicated DTensor."""
    return _dtensor(tensor.contiguous(), Replicate(), tuple(tensor.shape), groups)


def _dtensor(local: torch.Tensor, placement: TorchPlacement, shape: tuple[int, ...], groups: MeshGroups) -> DTensor:
    stride = contiguous_stride(shape)
    placements = [placement] * len(groups.shape)
    return DTensor.from_local(local, groups.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def own_part(value: DTensor, placements: Placements, groups: MeshGroups) -> torch.Tensor | None:
    """This rank's part of ``value`` in ``placements`` on the mesh of ``groups``, if ``value`` is on these ranks and
    either sharded as :func:`join` does or replicated; otherwise None."""
    if value.device_mesh.mesh.flatten().tolist() != groups.mesh.mesh.flatten().tolist():
        return None
    local, count = local_tensor(value).detach(), groups.mesh.size()
    if all(placement == Replicate() for placement in value.placements):
        return take_local(local, placements, groups.shape, groups.coordinate)
    in_parts = all(placement == SHARD_0 for placement in value.placements)
    if not in_parts or value.shape[0] % count or value.shape[0] == 0:
        return None
    outer = _leading_shards(placements)
    inner_axes = groups.axes[outer:]
    size = value.shape[0] // math.prod(groups.shape[:outer])
    gathered = Collectives(groups).all_gather(local, inner_axes, 0, size).wait() if inner_axes else local
    return take_local(gathered, placements[outer:], groups.shape[outer:], groups.coordinate[outer:])


def _leading_shards(placements: Placements) -> int:
    """The number of outermost axes that are ``Shard(0)``; 0 if any axis shards dim 0 in another way."""
    outer = next((axis for axis, placement in enumerate(placements) if placement != SHARD_0), len(placements))
    strided = any(shard_dim(placement) == 0 and placement != SHARD_0 for placement in placements)
    return 0 if strided else outer


def whole(value: DTensor, groups: MeshGroups) -> torch.Tensor:
    """The whole of ``value`` on every rank. Collective."""
    gathered = own_part(value, (Replicate(),) * len(groups.shape), groups)
    if gathered is not None:
        return gathered
    with torch.no_grad():
        return value.full_tensor()
