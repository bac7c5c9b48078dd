"""Correct decompositions that replace wrong ones of torch, which torch applies by itself while it traces.

``tests/op_db/test_decompositions.py`` compares the decompositions of torch and autopar with the operations' own
kernels; those that are wrong, or fail, are rewritten here. They run below autograd, so backward is derived from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.torch_internals.operators import OpOverload, autograd_kernel, set_autograd_kernel
from autopar.torch_internals.replacements import recurrent_layers as their_layers
from autopar.torch_internals.replacements import recurrent_layers_replaced

from .registry import aten

# torch's at::Reduction: None 0, Mean 1, Sum 2.
_MEAN, _SUM = 1, 2


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The mean over classes c that are not target and targets t, up to the first -1 of a row, of
    ``max(0, 1 - x[t] + x[c])``, summed over t. Torch's decomposition counts places behind the -1 as targets 0."""
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    # Integers, so that the cumulative sum is exact: it is 0 at places before the first -1.
    valid = (targets == -1).long().cumsum(1) == 0
    places = torch.where(valid, targets, 0)
    is_target = ((torch.arange(classes, device=x.device) == places.unsqueeze(-1)) & valid.unsqueeze(-1)).any(1)
    margins = 1.0 - rows.gather(1, places).unsqueeze(-1) + rows.unsqueeze(1)
    counts = valid.unsqueeze(-1) & ~is_target.unsqueeze(1)
    each = torch.where(counts, margins.relu(), 0.0).sum((1, 2)) / classes
    mask = is_target.to(x.dtype).reshape(target.shape)
    if reduction == _SUM or (reduction == 0 and x.dim() < 2):
        return each.sum(), mask
    return (each.mean() if reduction == _MEAN else each), mask


def recurrent_layers(
    x: Tensor, hidden: Any, params: Any, biased: bool, layers: int, dropout: float, train: bool, both: bool,
    first: bool,
    layer: Any,
) -> tuple[Tensor, list[Any]]:  # fmt: skip
    """Torch's decomposition, one layer at a time, with the dropout between layers that torch's omits."""
    x, ways, final = x.transpose(0, 1) if first else x, 2 if both else 1, []
    for index in range(layers):
        if index and train and dropout:
            x = torch.dropout(x, dropout, True)
        own = slice(ways * index, ways * (index + 1))
        x, last = their_layers(x, hidden[own], params[own], biased, 1, 0.0, train, both, False, layer)
        final += last
    return (x.transpose(0, 1) if first else x), final


CORRECTED: dict[OpOverload, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
}


@contextmanager
def corrected() -> Iterator[None]:
    """Makes torch's tracer apply these decompositions."""
    before = {op: autograd_kernel(op) for op in CORRECTED}
    try:
        for op, ours in CORRECTED.items():
            set_autograd_kernel(op, ours)
        with recurrent_layers_replaced(recurrent_layers):
            yield
    finally:
        for op, kernel in before.items():
            set_autograd_kernel(op, kernel)
