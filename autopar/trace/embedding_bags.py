"""Bags of embeddings, expressed by operations that have rules: lookups, and sums over the bag.

torch's ``_embedding_bag`` looks up and reduces in one kernel, whose backward needs intermediate results of forward. As
a lookup and a sum, tables can be sharded by rows and by columns and bags by the batch, like any other embedding. The
price is the memory of the rows before they are summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_embedding_bag = F.embedding_bag


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """``torch.nn.functional.embedding_bag``: bags are the rows of ``input`` [bags, length], or runs of ``input``
    [indices] that begin at ``offsets``; -> [bags, width]. Torch's own runs for a maximum, and for options that write
    into the table."""
    swapped = weight.dtype == torch.long and input.is_floating_point()
    if swapped or mode not in ("sum", "mean") or max_norm is not None or scale_grad_by_freq:
        return _embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    shares = _shares(input, weight, per_sample_weights, padding_idx)
    rows = F.embedding(input, weight, padding_idx)
    rows = rows if shares is None else rows * shares.unsqueeze(-1)
    if offsets is None:
        return _averaged(rows.sum(1), _members(input, padding_idx).sum(1), mode)
    return _runs(rows, input, offsets, mode, include_last_offset, padding_idx)


def _shares(
    indices: Tensor, weight: Tensor, per_sample_weights: Tensor | None, padding_idx: int | None
) -> Tensor | None:
    """The weight of each row, 0 for padding; None if all weights are 1."""
    if padding_idx is None:
        return per_sample_weights
    real = _members(indices, padding_idx).to(weight.dtype)
    return real if per_sample_weights is None else per_sample_weights * real


def _members(indices: Tensor, padding_idx: int | None) -> Tensor:
    """1 for each index that is not padding, else 0."""
    return torch.ones_like(indices) if padding_idx is None else (indices != padding_idx).to(indices.dtype)


def _runs(
    rows: Tensor, indices: Tensor, offsets: Tensor, mode: str, include_last_offset: bool, padding_idx: int | None
) -> Tensor:
    """Sums over runs of ``rows`` [indices, width]; each row is added to its bag. The last offset, if included, is the
    number of indices."""
    places = torch.arange(indices.shape[0], device=offsets.device, dtype=offsets.dtype)
    starts = offsets[:-1] if include_last_offset else offsets
    # Of several bags that begin at the same place, the last has the row; the others are empty.
    bags = torch.bucketize(places, starts, right=True) - 1
    members = _members(indices, padding_idx)
    total = rows.new_zeros(starts.shape[0], rows.shape[1]).index_add(0, bags, rows)
    count = members.new_zeros(starts.shape[0]).index_add(0, bags, members)
    return _averaged(total, count, mode)


def _averaged(total: Tensor, count: Tensor, mode: str) -> Tensor:
    return total if mode == "sum" else total / count.clamp(min=1).unsqueeze(-1).to(total.dtype)
