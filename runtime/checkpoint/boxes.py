"""Which parts of a whole tensor this rank holds, as boxes, and which of them it writes.

A shard is a box, except under strided placements (the thirds of a fused query-key-value projection), where it is
several: torch's own checkpoints save one offset for a shard and need the first form. What several ranks hold is divided
among them, so that each element is written once and all ranks write about as much.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import CheckpointError
from autopar.ir.placements import chunk_bounds
from autopar.runtime.torch_internals.dtensors import local_tensor

# Tensors of fewer bytes are written by one of the ranks that hold them.
# Chosen: the entry of a piece in the index is then a thousandth of it.
_UNDIVIDED_BYTES = 1 << 20
# Global start and length, in the order in which they lie in the local tensor.
Runs = list[tuple[int, int]]


@dataclass(frozen=True)
class Box:
    """The elements from ``offsets`` on, ``sizes`` of them along each dim, of a whole tensor; in the local tensor they
    begin at ``start``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of these elements in the ``local`` tensor."""
        for dim, (start, size) in enumerate(zip(self.start, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local

    def part(self, dim: int, begin: int, size: int) -> Box:
        """The ``size`` slices from ``begin`` on along ``dim``."""

        def changed(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:dim], value, *values[dim + 1 :])

        offsets = changed(self.offsets, self.offsets[dim] + begin)
        return Box(offsets, changed(self.sizes, size), changed(self.start, self.start[dim] + begin))


@dataclass(frozen=True)
class Holders:
    """``count`` ranks hold the same elements; this one is number ``index`` of them, or None if it holds nothing."""

    count: int = 1
    index: int | None = 0


def whole_box(shape: Sequence[int]) -> Box:
    """All elements of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape), (0,) * len(shape))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor`` on this rank, detached."""
    return local_tensor(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


def boxes_of(tensor: torch.Tensor, name: str) -> list[Box]:
    """The boxes that this rank holds of ``tensor``, which may be a DTensor. Raises :class:`CheckpointError` for
    placements that do not say which elements a shard has."""
    if not isinstance(tensor, DTensor):
        return [whole_box(tensor.shape)]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    runs = [_runs(tensor, coordinate, dim) for dim in range(tensor.dim())]
    local = local_tensor(tensor)
    if tuple(local.shape) != tuple(sum(size for _, size in of_dim) for of_dim in runs):
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)} and placements {tuple(map(str, tensor.placements))}, of which this "
            f"rank holds {list(local.shape)}: these placements do not say which elements; redistribute it first"
        )
    return list(_products(runs))


def _runs(tensor: DTensor, coordinate: Sequence[int], dim: int) -> Runs:
    """What this rank holds along ``dim``: cut by one axis after the other, from the outermost."""
    runs: Runs = [(0, tensor.shape[dim])]
    for axis, placement in enumerate(tensor.placements):
        parts = tensor.device_mesh.size(axis)
        if parts > 1 and getattr(placement, "dim", None) == dim:
            runs = _cut(runs, placement, parts, coordinate[axis])
    return runs


def _cut(runs: Runs, placement: Placement, parts: int, index: int) -> Runs:
    total = sum(size for _, size in runs)
    factor = int(getattr(placement, "split_factor", 1))  # Of torch's own strided shards.
    taken: Runs = []
    for piece in range(factor):
        begin, size = chunk_bounds(total, factor, piece)
        start, length = chunk_bounds(size, parts, index)
        taken.extend(_between(runs, begin + start, length))
    return taken


def _between(runs: Runs, begin: int, length: int) -> Iterator[tuple[int, int]]:
    """The part of ``runs`` from local index ``begin`` on, ``length`` elements."""
    position = 0
    for start, size in runs:
        first, last = max(begin, position), min(begin + length, position + size)
        if first < last:
            yield start + first - position, last - first
        position += size


def _products(runs: Sequence[Runs]) -> Iterator[Box]:
    placed = []
    for of_dim in runs:
        ends = itertools.accumulate(size for _, size in of_dim)
        placed.append([(start, size, end - size) for (start, size), end in zip(of_dim, ends, strict=True)])
    for combination in itertools.product(*placed):
        starts, sizes, places = zip(*combination, strict=True) if combination else ((), (), ())
        yield Box(tuple(starts), tuple(sizes), tuple(places))


def holders_of(tensor: torch.Tensor, everyone: Holders) -> Holders:
    """The ranks that hold the same elements of ``tensor`` as this one: for a plain tensor, ``everyone``."""
    if not isinstance(tensor, DTensor):
        return everyone
    axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    return holders_on(tensor.device_mesh, axes)


def holders_on(mesh: DeviceMesh, axes: Sequence[int]) -> Holders:
    """The ranks that differ from this one only on ``axes`` of ``mesh``."""
    coordinate, index = mesh.get_coordinate(), 0
    if coordinate is None:
        return Holders(1, None)
    for axis in axes:
        index = index * mesh.size(axis) + coordinate[axis]
    return Holders(math.prod(mesh.size(axis) for axis in axes), index)


def boxes_to_write(tensor: torch.Tensor, name: str, holders: Holders) -> list[Box]:
    """The boxes of ``tensor`` that this rank writes, of those that it and other ``holders`` have."""
    if holders.index is None:
        return []
    empty = not tensor.numel()
    held = [whole_box(tensor.shape)] if empty else boxes_of(tensor, name)
    if holders.count == 1:
        return held
    if empty or tensor.numel() * tensor.element_size() < _UNDIVIDED_BYTES:
        return held if zlib.crc32(name.encode()) % holders.count == holders.index else []
    return [share for box in held if (share := _share(box, holders.count, holders.index)) is not None]


def _share(box: Box, count: int, index: int) -> Box | None:
    """Part ``index`` of ``count`` of ``box``: of its first dim, which lies together in memory, if that is long
    enough."""
    dim = 0 if box.sizes[0] >= count else max(range(len(box.sizes)), key=lambda d: box.sizes[d])
    begin, size = chunk_bounds(box.sizes[dim], count, index)
    return box.part(dim, begin, size) if size else None
