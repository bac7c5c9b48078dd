"""Samples that each rank read for itself, as one global batch.

A batch that was read in parts is a DTensor placed ``Shard(0)`` on every axis: the global batch is the ranks' samples,
one rank after the other. That needs no plan, so a batch may be read before there is one. A program that wants a part of
the batch which this rank did not read (a whole one under tensor parallelism, a piece of each sample's sequence) gets
it by one all-gather over the ranks that read it, and is cut from that.
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
    """``leaves`` with each tensor, the samples of this rank along dim 0, as a DTensor of the samples of all ranks.
    Tensors without dims, DTensors, and what is not a tensor are the same on every rank, and stay as they are.

    Of ``copies`` neighbouring ranks that hold the same samples those of the first count. Collective. Raises, on every
    rank, :class:`InputMismatchError` where ranks give tensors that differ in more than their number of samples.
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
    """The DTensor of the samples of all ranks, of which each rank has as many as ``sizes`` says."""
    if copies == 1 and len(set(sizes)) == 1 and sizes[0] > 0:
        return _dtensor(own.contiguous(), SHARD_0, (own.shape[0] * len(sizes), *own.shape[1:]), groups)
    longest = max(sizes)
    if longest == 0:
        return whole_dtensor(own, groups)
    padded = torch.cat([own, own.new_zeros((longest - own.shape[0], *own.shape[1:]))])
    every = Collectives(groups).all_gather(padded, groups.axes, 0, longest * len(sizes)).wait().split(longest)
    kept = [piece[:size] for piece, size in zip(every, sizes, strict=True)][::copies]
    return whole_dtensor(torch.cat(kept), groups)


def whole_dtensor(tensor: torch.Tensor, groups: MeshGroups) -> DTensor:
    """The DTensor of which every rank holds all, ``tensor``."""
    return _dtensor(tensor.contiguous(), Replicate(), tuple(tensor.shape), groups)


def _dtensor(local: torch.Tensor, placement: TorchPlacement, shape: tuple[int, ...], groups: MeshGroups) -> DTensor:
    stride = contiguous_stride(shape)
    placements = [placement] * len(groups.shape)
    return DTensor.from_local(local, groups.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def own_part(value: DTensor, placements: Placements, groups: MeshGroups) -> torch.Tensor | None:
    """What this rank holds of ``value`` placed as ``placements`` says on the mesh of ``groups``, if ``value`` lies on
    these ranks, in parts as :func:`join` makes them or whole on each; None where it lies otherwise."""
    if value.device_mesh.mesh.flatten().tolist() != groups.mesh.mesh.flatten().tolist():
        return None
    local, count = local_tensor(value).detach(), groups.mesh.size()
    if all(placement == Replicate() for placement in value.placements):
        return take_local(local, placements, groups.shape, groups.coordinate)
    in_parts = all(placement == SHARD_0 for placement in value.placements)
    if not in_parts or value.shape[0] % count or value.shape[0] == 0:
        return None
    kept = _leading_shards(placements)
    rest = groups.axes[kept:]
    size = value.shape[0] // math.prod(groups.shape[:kept])
    gathered = Collectives(groups).all_gather(local, rest, 0, size).wait() if rest else local
    return take_local(gathered, placements[kept:], groups.shape[kept:], groups.coordinate[kept:])


def _leading_shards(placements: Placements) -> int:
    """How many of the outermost axes divide dim 0 plainly; none if inner axes divide it in another way."""
    kept = next((axis for axis, placement in enumerate(placements) if placement != SHARD_0), len(placements))
    strided = any(shard_dim(placement) == 0 and placement != SHARD_0 for placement in placements)
    return 0 if strided else kept


def whole(value: DTensor, groups: MeshGroups) -> torch.Tensor:
    """All of ``value`` on every rank. Collective."""
    found = own_part(value, (Replicate(),) * len(groups.shape), groups)
    if found is not None:
        return found
    with torch.no_grad():
        return value.full_tensor()
