"""Gathers tensors to the host memory of the first rank, a block at a time: no rank has more of others at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from .boxes import Box, Holders, boxes_to_write, holders_of, local_part
from .ranks import Ranks

# The bytes of a block, about: the first rank has some of them at once (measured: 64 MiB, of blocks of 16 MiB).
# Chosen: little memory, and each message is worth its call.
BLOCK_BYTES = 4 << 20
# For each rank, which boxes of each tensor it sends.
Sent = Sequence[Mapping[str, Sequence[Box]]]


def who_sends(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> Sent:
    """Which boxes of ``tensors`` each rank sends: each element once. Collective."""
    everyone = Holders(ranks.count, ranks.index)
    own = {name: boxes_to_write(t, name, holders_of(t, everyone)) for name, t in tensors.items()}
    return ranks.all(own)


def blocks(name: str, tensor: torch.Tensor, sent: Sent, ranks: Ranks) -> Iterator[torch.Tensor]:
    """The tensor on the first rank, some slices of its first dim at a time, in order; on others as many empty tensors.
    Collective: every rank takes all blocks."""
    if not tensor.numel():
        return
    rows = tensor.shape[0] if tensor.dim() else 1
    step = max(1, BLOCK_BYTES * rows // (tensor.numel() * tensor.element_size()))
    for begin in range(0, rows, step):
        yield _block(name, tensor, begin, min(step, rows - begin), sent, ranks)


def _block(name: str, tensor: torch.Tensor, begin: int, count: int, sent: Sent, ranks: Ranks) -> torch.Tensor:
    local = local_part(tensor)
    own = [(box, box.of(local).to("cpu").contiguous()) for box in _within(sent[ranks.index][name], begin, count)]
    if not ranks.is_first:
        for _, value in own:
            dist.send(_bytes(value), group=ranks.group, group_dst=0)
        return torch.empty(0, dtype=tensor.dtype)
    block = torch.empty((count, *tensor.shape[1:]) if tensor.dim() else (), dtype=tensor.dtype)
    for box, value in own:
        _place(block, box, begin).copy_(value)
    for rank in range(1, ranks.count):
        for box in _within(sent[rank][name], begin, count):
            value = torch.empty(box.sizes, dtype=tensor.dtype)
            dist.recv(_bytes(value), group=ranks.group, group_src=rank)
            _place(block, box, begin).copy_(value)
    return block


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(-1).view(torch.uint8)


def _within(boxes: Sequence[Box], begin: int, count: int) -> Iterator[Box]:
    """The parts of ``boxes`` in the ``count`` slices of the first dim from ``begin`` on."""
    for box in boxes:
        if not box.sizes:
            yield box
            continue
        first = max(begin, box.offsets[0])
        last = min(begin + count, box.offsets[0] + box.sizes[0])
        if first < last:
            yield box.part(0, first - box.offsets[0], last - first)


def _place(block: torch.Tensor, box: Box, begin: int) -> torch.Tensor:
    """Where ``box`` is in a block that begins with slice ``begin``."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        block = block.narrow(dim, offset - (0 if dim else begin), size)
    return block
