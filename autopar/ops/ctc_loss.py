"""The loss of connectionist temporal classification as one operation of fixed shapes, ``autopar.ctc_loss``.

torch's kernel saves a table whose number of columns, the labels of the longest target, is a value of a tensor. Here the
table exists only inside: the operation returns the loss of every sequence together with its gradient, which backward
multiplies by that of the result. Targets are padded to one length; the padding is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """``log_probs`` [T, N, C], ``targets`` [N, S], lengths [N] -> losses [N], and their gradients by ``log_probs``."""
    operands = (log_probs, targets, input_lengths, target_lengths)
    loss, table = torch.ops.aten._ctc_loss.Tensor(*operands, blank, zero_infinity)
    gradient = torch.ops.aten._ctc_loss_backward.Tensor(
        torch.ones_like(loss), *operands, loss, table, blank, zero_infinity
    )
    if zero_infinity:
        loss = torch.where(loss == math.inf, torch.zeros_like(loss), loss)
    return loss.contiguous(), gradient.contiguous()


@ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    losses = log_probs.new_empty(log_probs.shape[1])
    return losses, torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return gradient * grad_losses[:, None], None, None, None, None, None


ctc_loss.register_autograd(_differentiate, setup_context=_save)


# Traced graphs contain it, so it is also registered with torch.
OPERATIONS: dict[str, Callable[..., Any]] = {"autopar.ctc_loss.default": ctc_loss}
