"""Counts the work of a block of experts in one operation (:mod:`autopar.ops.experts`), as it runs.

Rows are gathered in the order of their experts, multiplied in groups, activated operation by operation, multiplied
again, and added up for each token; backward repeats the first product and the activation. Products move their operands
and results while they compute, as other products do; what the kernels between them read and write comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.node import Dim
from autopar.ops.activation import Activation
from autopar.ops.exchanged_experts import IMBALANCE
from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.operators import schema_of
from autopar.torch_internals.trees import tree_leaves

from .flops_and_bytes import Count, Inputs, Matrix, Operation, Outputs, Shape, every_tensor

# What an activation moves for each element that it takes, forward and backward, where its text does not say.
# Chosen: a gate with a sigmoid, counted by hand.
_USUAL = (2.5, 8.0)


def experts(backward: bool, exchanged: bool = False) -> tuple[Count, Count, Shape, Count, Count]:
    """FLOPs, bytes, (m, n, k), rows of each expert here, and bytes of the kernels between products.

    Operands are the gradient (of ``backward``), tokens, ids, weights, the two matrices of the experts on this device
    and their biases. All experts are assumed to be chosen equally often, so a device computes its share of the rows;
    where rows are ``exchanged``, as many as it sends, times the imbalance of prices."""
    tokens = int(backward)
    # Of the first matrix and the second: forward; and the result that backward needs again, and both gradients.
    first, second = (3, 2) if backward else (1, 1)

    def share(call: Operation, inputs: Inputs) -> Dim:
        choices, held = math.prod(inputs[tokens + 1].shape), inputs[tokens + 3].shape[0]
        if exchanged:
            return choices * IMBALANCE
        count = call.args[-2]
        exact = isinstance(choices, int) and isinstance(held, int)
        return choices * held // count if exact else choices * held / count

    def sizes(inputs: Inputs) -> tuple[Dim, Dim, Dim]:
        """The widths of tokens, of what the activation takes, and of what it gives."""
        up, down = inputs[tokens + 3].shape, inputs[tokens + 4].shape
        return up[2], up[1], down[2]

    def flops(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        width, taken, given = sizes(inputs)
        return 2 * share(call, inputs) * width * (first * taken + second * given)

    def nbytes(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        width, taken, given = sizes(inputs)
        moved = first * (width + taken) + second * (given + width)
        return every_tensor(call, inputs, outputs) + share(call, inputs) * moved * inputs[tokens].dtype.itemsize

    def between(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        width, taken, given = sizes(inputs)
        activated = traffic(call.args[-3], taken if isinstance(taken, int) else 0)
        # Gathered rows are read and written, results read once more; of the gradient too. One factor scales rows,
        # forward; backward it scales two of them, and its own gradient is a product of two.
        of_row = (5 * width + 8 * given if backward else 3 * width + 2 * given) + sum(activated[: 1 + tokens]) * taken
        biased = (taken + width) * (4 + 2 * backward) if len(inputs) > tokens + 5 else 0
        return inputs[tokens].dtype.itemsize * (
            share(call, inputs) * (of_row + biased) + math.prod(inputs[tokens].shape)
        )

    def rows(call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        return share(call, inputs) / inputs[tokens + 3].shape[0]

    def matrix(inputs: Inputs, outputs: Outputs) -> Matrix:
        width, taken, _ = sizes(inputs)
        return math.prod(inputs[tokens + 1].shape), taken, width

    return flops, nbytes, matrix, rows, between


@lru_cache(maxsize=256)
def traffic(act: Any, width: int) -> tuple[float, float]:
    """Elements that an activation reads and writes for each of the ``width`` elements of a row that it takes, forward
    and backward, operation by operation."""
    if not width or not isinstance(act, str):
        return _USUAL
    try:
        function, row = Activation.parse(act), torch.empty(2, width, device="meta")
        with _Counting() as forward:
            result = function(row)
        with _Counting() as backward:
            function.gradient(row, result)
    except Exception:  # Of a shard of a row an activation cannot take its halves.
        return _USUAL
    return forward.elements / row.numel(), backward.elements / row.numel()


class _Counting(TorchDispatchMode):
    """Adds up elements that operations read and write; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in schema_of(function).returns)
        if not is_view:
            self.elements += sum(each.numel() for each in _tensors((args, result)))
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))
