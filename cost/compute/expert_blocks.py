"""Counts the work of a block of experts in one operation (:mod:`autopar.ops.experts`), as it runs.

Rows are gathered in the order of their experts, multiplied in groups, activated operation by operation, multiplied
again, and added up for each token; backward repeats the first product and the activation. Products move their operands
and results while they compute, as other products do; what the kernels between them read and write comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.node import Dim
from autopar.ops.activation import Activation
from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.operators import schema_of
from autopar.torch_internals.trees import tree_leaves

from .flops_and_bytes import Inputs, Matrix, Operation, Outputs, every_tensor

# What an activation moves for each element that it takes, forward and backward, where its text does not say.
# Chosen: a gate with a sigmoid, counted by hand.
_USUAL = (2.5, 8.0)


@dataclass(frozen=True)
class ExpertBlock:
    """Counts of a block, forward or ``backward``.

    Operands are the gradient (of ``backward``), tokens, ids, weights, the two matrices of the experts on this device
    and their biases. All experts are counted as chosen equally often, so that a device computes its share of the rows;
    where rows are ``exchanged``, as many as it sends."""

    backward: bool
    exchanged: bool = False

    @property
    def _products(self) -> tuple[int, int]:
        """With the first matrix and the second: forward; or what backward needs again, and both gradients."""
        return (3, 2) if self.backward else (1, 1)

    def _sizes(self, inputs: Inputs) -> tuple[Dim, Dim, Dim]:
        """The widths of tokens, of what the activation takes, and of what it gives."""
        up, down = inputs[self.backward + 3].shape, inputs[self.backward + 4].shape
        return up[2], up[1], down[2]

    def _rows(self, call: Operation, inputs: Inputs) -> Dim:
        """Rows of this device."""
        choices, held = math.prod(inputs[self.backward + 1].shape), inputs[self.backward + 3].shape[0]
        if self.exchanged:
            return choices
        count = call.args[-2]
        exact = isinstance(choices, int) and isinstance(held, int)
        return choices * held // count if exact else choices * held / count

    def is_shared(self, call: Operation, inputs: Inputs) -> bool:
        """Whether other devices have other experts, so that one may get more rows than another."""
        return self.exchanged or inputs[self.backward + 3].shape[0] != call.args[-2]

    def flops(self, call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        width, taken, given = self._sizes(inputs)
        first, second = self._products
        return 2 * self._rows(call, inputs) * width * (first * taken + second * given)

    def bytes(self, call: Operation, inputs: Inputs, outputs: Outputs) -> Dim:
        width, taken, given = self._sizes(inputs)
        first, second = self._products
        moved = first * (width + taken) + second * (given + width)
        itemsize = inputs[self.backward].dtype.itemsize
        return every_tensor(call, inputs, outputs) + self._rows(call, inputs) * moved * itemsize

    def matrix(self, inputs: Inputs, outputs: Outputs) -> Matrix:
        width, taken, _ = self._sizes(inputs)
        return math.prod(inputs[self.backward + 1].shape), taken, width

    def rows(self, call: Operation, inputs: Inputs) -> Dim:
        """Rows of each expert of this device."""
        return self._rows(call, inputs) / inputs[self.backward + 3].shape[0]

    def between(self, call: Operation, inputs: Inputs) -> Dim:
        """Bytes that kernels between products move: gathered rows are read and written, results read once more, both of
        the gradient too. A factor scales the second product's operand, and backward also its gradient; its own gradient
        is a product of the two."""
        width, taken, given = self._sizes(inputs)
        activated = traffic(call.args[-3], taken if isinstance(taken, int) else 0)
        of_row: Any = (5 * width + 8 * given) if self.backward else (3 * width + 2 * given)
        of_row += sum(activated[: 1 + self.backward]) * taken
        if len(inputs) > self.backward + 5:  # Biases are gathered for each row, and added or multiplied.
            of_row += (taken + width) * (4 + 2 * self.backward)
        tokens = inputs[self.backward]
        return tokens.dtype.itemsize * (self._rows(call, inputs) * of_row + math.prod(tokens.shape))


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
