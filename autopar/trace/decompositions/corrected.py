"""Right decompositions in place of wrong ones of torch's that torch applies by itself while it traces.

``tests/op_db/test_decompositions.py`` compares what torch and autopar take apart with the operations' own kernels; what
it finds wrong, or what fails, is written anew here. These stand below autograd, so backward is derived from them.
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
    ``max(0, 1 - x[t] + x[c])``, summed over t. Torch's decomposition lets places behind the -1 count as targets 0."""
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    # Integers, so that the cumulated sum is exact: places before the first -1 have seen none.
    given = (targets == -1).long().cumsum(1) == 0
    places = torch.where(given, targets, 0)
    is_target = ((torch.arange(classes, device=x.device) == places.unsqueeze(-1)) & given.unsqueeze(-1)).any(1)
    margins = 1.0 - rows.gather(1, places).unsqueeze(-1) + rows.unsqueeze(1)
    counts = given.unsqueeze(-1) & ~is_target.unsqueeze(1)
    each = torch.where(counts, margins.relu(), 0.0).sum((1, 2)) / classes
    marked = is_target.to(x.dtype).reshape(target.shape)
    if reduction == _SUM or (reduction == 0 and x.dim() < 2):
        return each.sum(), marked
    return (each.mean() if reduction == _MEAN else each), marked


def recurrent_layers(
    x: Tensor, hidden: Any, params: Any, biased: bool, layers: int, dropout: float, train: bool, both: bool,
    first: bool,
    layer: Any,
) -> tuple[Tensor, list[Any]]:  # fmt: skip
    """Torch's, one layer at a time, with dropout between layers, which torch's decomposition forgets."""
    x, ways, final = x.transpose(0, 1) if first else x, 2 if both else 1, []
    for index in range(layers):
        if index and train and dropout:
            x = torch.dropout(x, dropout, True)
        own = slice(ways * index, ways * (index + 1))
        x, last = their_layers(x, hidden[own], params[own], biased, 1, 0.0, train, both, False, layer)
        final += last
    return (x.transpose(0, 1) if first else x), final


MENDED: dict[OpOverload, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
}


@contextmanager
def mended() -> Iterator[None]:
    """Within, torch's tracer applies ours."""
    before = {op: autograd_kernel(op) for op in MENDED}
    try:
        for op, ours in MENDED.items():
            set_autograd_kernel(op, ours)
        with recurrent_layers_replaced(recurrent_layers):
            yield
    finally:
        for op, theirs in before.items():
            set_autograd_kernel(op, theirs)
