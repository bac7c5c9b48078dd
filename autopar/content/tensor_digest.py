"""A hash of the values of a tensor."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from autopar.torch_internals.modes import without_dispatch_modes


def tensor_digest(tensor: torch.Tensor) -> str | None:
    """A hash of dtype, shape and numbers; None for a tensor that hides them (fake, meta, sparse, of another class)."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    with without_dispatch_modes(), torch.no_grad():
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        numbers = flat.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + numbers).hexdigest()
