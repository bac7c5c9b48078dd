"""A short hash of a tensor's values, to compare the inputs of ranks.

Up to :data:`WHOLE_BYTES` every byte is hashed (SHA-256, about a gigabyte a second). For a larger tensor the hash covers
:data:`BLOCKS` blocks of :data:`BLOCK_BYTES`, evenly spaced from the first to the last, and two sums over the whole,
modulo 2**64: of its 8-byte words, and of the words times their positions in a line of :data:`LINE` words. A single
changed value is always detected; changes between the blocks that preserve both sums are not.
"""

from __future__ import annotations

import hashlib

import torch

# Chosen: 30 ms at a gigabyte a second.
WHOLE_BYTES = 32 << 20
# Chosen: a page.
BLOCK_BYTES = 4096
# Chosen: 8 MiB in all.
BLOCKS = 2048
# Chosen: the sums of columns fit in a core's cache (32 KiB).
LINE = 4096
# Bytes of the hash. Chosen: 128 bits do not collide by chance.
SIZE = 16


def content_hash(tensor: torch.Tensor) -> bytes:
    """The hash, :data:`SIZE` bytes; zeros for tensors that cannot be read (meta, fake and sparse ones)."""
    readable = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not readable or tensor.is_meta or tensor.is_quantized:
        return bytes(SIZE)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    digest = hashlib.sha256()
    for part in (flat,) if flat.numel() <= WHOLE_BYTES else _parts(flat):
        digest.update(part.cpu().numpy().data)
    return digest.digest()[:SIZE]


def _parts(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of a large tensor that are hashed."""
    last = flat.numel() - BLOCK_BYTES
    starts = torch.linspace(0, last, BLOCKS, dtype=torch.float64, device=flat.device).long()
    offsets = torch.arange(BLOCK_BYTES, device=flat.device)
    blocks = flat[starts.unsqueeze(1) + offsets]
    count = flat.numel() // (8 * LINE) * LINE
    whole = flat[: 8 * count]
    # A view at an odd offset of its storage has no 8-byte words.
    words = (whole if whole.data_ptr() % 8 == 0 else whole.clone()).view(torch.int64).view(-1, LINE)
    columns = words.sum(0)
    weighted = columns * torch.arange(1, LINE + 1, device=flat.device)
    sums = torch.stack([columns.sum(), weighted.sum()]).view(torch.uint8)
    return blocks.flatten(), sums, flat[8 * count :]
