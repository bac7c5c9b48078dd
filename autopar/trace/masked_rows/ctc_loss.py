"""``F.ctc_loss`` without shapes that depend on values (:mod:`autopar.ops.ctc_loss`). Its targets may be concatenated,
as many as a mask selects: those of each sequence then begin where those of the sequences before it end.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.ctc_loss import ctc_loss

from .functions import Mode, handles
from .tensors import Rows

_SIGNATURE = inspect.signature(F.ctc_loss)


@handles(F.ctc_loss)
def _ctc_loss(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity = bound.arguments.values()
    lengths = (input_lengths, target_lengths)
    if not all(isinstance(t, Tensor) and not isinstance(t, Rows) for t in (log_probs, *lengths)):
        return NotImplemented  # The lengths are numbers: torch knows all shapes.
    input_lengths, target_lengths = (length.to(log_probs.device, torch.long).reshape(-1) for length in lengths)
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    padded = _padded(targets, target_lengths).to(log_probs.device)
    losses = ctc_loss(batched, padded, input_lengths, target_lengths, blank, zero_infinity)[0]
    if isinstance(targets, Rows):
        losses = torch.where(target_lengths <= padded.shape[1], losses, math.nan)
    if reduction == "mean":
        return (losses / target_lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def _padded(targets: Tensor, lengths: Tensor) -> Tensor:
    """Targets as [N, S]; for selected ones, S is the last dim of the tensor that they are selected from."""
    if isinstance(targets, Rows):
        return _in_turn(*_selected_first(targets), lengths)
    if targets.dim() == 1:
        return _in_turn(targets, targets.shape[0], lengths)
    return targets


def _selected_first(rows: Rows) -> tuple[Tensor, int]:
    """All values in one dim, the selected ones first, in order; and the width of the tensor that they are from."""
    mask = rows.selection.mask
    order = torch.argsort((~mask).flatten().to(torch.int8), stable=True)
    return rows.data_.expand(mask.shape).flatten()[order], mask.shape[-1]


def _in_turn(labels: Tensor, width: int, lengths: Tensor) -> Tensor:
    """``labels`` [n] as rows of ``width`` labels; a row begins at the sum of the ``lengths`` before it."""
    begin = lengths.cumsum(0) - lengths
    places = begin[:, None] + torch.arange(width, device=labels.device)
    return labels[places.clamp(max=labels.shape[0] - 1)]
