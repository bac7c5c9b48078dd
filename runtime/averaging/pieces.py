"""Which rank of a replica exchanges which shard.

Ranks of a replica that hold the same shard (parameters that are replicated over some inner axes) divide the tensors
among themselves, so that each is sent over the slow link once. Each rank exchanges those that it *owns* with the owners
in other replicas, and then gives them to the ranks beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.comm.groups import AxisGroup, MeshGroups, mesh_groups
from autopar.runtime.state.parameters import local_of

from .waits import awaited


@dataclass(frozen=True)
class Piece:
    """The shard of one tensor of ``size`` elements on this rank, ``local``, read when it is used since placing
    exchanges it. ``owner``: the index in ``beside``, the ranks of this replica that hold the same shard."""

    name: str
    size: int
    read: Callable[[], torch.Tensor]
    beside: AxisGroup
    owner: int

    @property
    def local(self) -> torch.Tensor:
        return self.read()

    @property
    def is_own(self) -> bool:
        """Whether this rank exchanges it."""
        return self.owner == self.beside.index


def parameter_pieces(parameters: Mapping[str, nn.Parameter], groups: MeshGroups) -> tuple[Piece, ...]:
    """The pieces of placed ``parameters`` that this rank holds, in their order. Collective over the replica, whose
    groups are ``groups``."""
    held = {name: (parameter, _beside(parameter, groups)) for name, parameter in parameters.items()}
    shards = [(name, local_of(p).numel(), beside) for name, (p, beside) in held.items() if beside is not None]
    owners = _owners(shards)
    return tuple(
        Piece(name, held[name][0].numel(), _reader(held[name][0]), beside, owners[name]) for name, _, beside in shards
    )


def buffer_pieces(buffers: Mapping[str, Callable[[], torch.Tensor]], groups: MeshGroups) -> tuple[Piece, ...]:
    """The pieces of buffers, which every rank of the replica has whole."""
    beside = groups.over(groups.axes)
    owners = _owners([(name, read().numel(), beside) for name, read in buffers.items()])
    return tuple(Piece(name, read().numel(), read, beside, owners[name]) for name, read in buffers.items())


def own_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Those that this rank exchanges: not those without elements."""
    return [piece for piece in pieces if piece.is_own and piece.local.numel()]


def spread(pieces: Iterable[Piece]) -> None:
    """Gives the values of the owners to the ranks beside them, in one message for each owner. Collective over the
    replica."""
    messages: dict[tuple[tuple[int, ...], int, torch.dtype], list[Piece]] = {}
    for piece in pieces:
        if piece.beside.group is not None:
            messages.setdefault((piece.beside.axes, piece.owner, piece.local.dtype), []).append(piece)
    for members in messages.values():
        _broadcast(members)


def _broadcast(members: list[Piece]) -> None:
    group, owner = members[0].beside, members[0].owner
    flat = torch.cat([piece.local.reshape(-1) for piece in members])
    awaited(lambda: dist.broadcast(flat.view(torch.uint8), group=group.group, group_src=owner))
    if group.index != owner:
        for piece, values in zip(members, flat.split([piece.local.numel() for piece in members]), strict=True):
            piece.local.copy_(values.view(piece.local.shape))


def _reader(parameter: nn.Parameter) -> Callable[[], torch.Tensor]:
    return lambda: local_of(parameter).detach()


def _beside(parameter: nn.Parameter, groups: MeshGroups) -> AxisGroup | None:
    """The ranks that hold the same shard; None for a parameter of another pipeline stage, or an empty shard."""
    if not isinstance(parameter, DTensor):
        return groups.over(groups.axes)
    if parameter.device_mesh.get_coordinate() is None:
        return None
    replicated = tuple(axis for axis, place in enumerate(parameter.placements) if place.is_replicate())
    return mesh_groups(parameter.device_mesh).over(replicated)


def _owners(shards: Iterable[tuple[str, int, AxisGroup]]) -> dict[str, int]:
    """For each name the index of the rank that exchanges it: the largest first, to the rank with the least."""
    loads: dict[tuple[int, ...], list[int]] = {}
    owners: dict[str, int] = {}
    for name, numel, beside in sorted(shards, key=lambda shard: -shard[1]):
        load = loads.setdefault(beside.axes, [0] * beside.size)
        owners[name] = load.index(min(load))
        load[owners[name]] += numel
    return owners
