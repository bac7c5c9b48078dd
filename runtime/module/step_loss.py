"""The loss that :meth:`~autopar.runtime.ParallelModule.step` returns: a plain tensor, of which ``backward()`` says what
has been done already."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from autopar.errors import AutoparError


def differentiated(loss: torch.Tensor) -> torch.Tensor:
    """``loss`` itself, detached: ``backward()`` of it raises :class:`AutoparError` instead of torch's error about
    tensors without a graph. It is an attribute of this one tensor, which copies and pickles leave behind."""
    loss.__dict__.update(backward=_backward, __getstate__=_no_state)
    return loss


def _backward(*_: Any, **__: Any) -> NoReturn:
    raise AutoparError(
        "step() has run backward already and left the gradients on the parameters: leave backward() out and call "
        "optimizer.step(). A factor of the loss is step(..., scale=1 / 4). For a loss of your own, without pipeline "
        "stages and microbatches: out = model(...), compute the loss from out, loss.backward()"
    )


def _no_state() -> None:
    """What torch saves in addition to the numbers: a file of them needs nothing of autopar."""
