"""Rows of experts by grouped products: one kernel for all experts of a device, where torch has one.

What :mod:`.experts` computes expert by expert takes a dozen kernels for each; with many experts of few rows a GPU waits
for the host to launch them. ``torch.nn.functional.grouped_mm`` multiplies consecutive groups of rows each by its own
matrix. Rows are in the order of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .activation import Activation

# Bytes of which rows of operands must be multiples, and generations of GPUs (Hopper, Blackwell) that torch has a kernel
# for; on others it waits for the host, and multiplies group by group.
_ALIGNMENT, _GENERATIONS = 16, (9, 10)
_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)


def can_group(rows: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether torch multiplies ``rows`` [n, H] by the matrices ``up`` [E, F, H] and ``down`` [E, H, I] of experts in
    groups, on a GPU. (On processors its kernel is a loop over groups, like ours.)"""
    if _grouped_mm is None or {each.dtype for each in (rows, up, down)} != {torch.bfloat16}:
        return False
    if not rows.is_cuda or not torch.cuda.is_available():  # Fake tensors are of GPUs that are not there.
        return False
    dims = (up.shape[1], up.shape[2], down.shape[2])
    aligned = all(dim * rows.element_size() % _ALIGNMENT == 0 for dim in dims)
    aligned &= all(1 in each.stride()[1:] and each.data_ptr() % _ALIGNMENT == 0 for each in (up, down))
    return aligned and torch.cuda.get_device_capability(rows.device)[0] in _GENERATIONS


def laid_out(result: Tensor, like: Tensor) -> Tensor:
    """``result`` with the strides that ``empty_like(like)`` has: compiled code that takes it relies on these."""
    empty = torch.empty_like(like, device="meta")
    return result if result.stride() == empty.stride() else torch.empty_like(like).copy_(result)


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of ``count`` rows, one for each expert: ``ends`` [E], int32, where each ends."""

    ends: Tensor
    count: int

    @cached_property
    def sizes(self) -> Tensor:
        """How many rows each expert has [E]."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).long()

    @cached_property
    def expert(self) -> Tensor:
        """The expert of each row [n]."""
        experts = torch.arange(len(self.ends), device=self.ends.device)
        return torch.repeat_interleave(experts, self.sizes, output_size=self.count)

    def times(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """``rows`` [n, K], each times the matrix of its expert [E, K, N] -> [n, N]."""
        if not len(rows):
            return rows.new_zeros(0, matrices.shape[2])
        product: Tensor = _grouped_mm(rows.contiguous(), matrices, offs=self.ends)  # type: ignore[misc]
        return product

    def linear(self, rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        """``rows`` [n, K], ``weights`` [E, N, K], ``bias`` [E, N] -> [n, N]."""
        product = self.times(rows, weights.transpose(1, 2))
        return product if bias is None else product + bias[self.expert]

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """For each expert ``left.T @ right`` of its rows: [n, M], [n, N] -> [E, M, N]; zero where it has none."""
        if not len(left):
            return left.new_zeros(len(self.ends), left.shape[1], right.shape[1])
        product: Tensor = _grouped_mm(left.contiguous().t(), right.contiguous(), offs=self.ends)  # type: ignore[misc]
        return product

    def sums(self, rows: Tensor) -> Tensor:
        """For each expert the sum of its rows: [n, N] -> [E, N]. In an order that does not depend on the run, and in
        float32: the kernel adds in the dtype of its operand."""
        lengths = self.sizes
        summed: Tensor = torch.segment_reduce(rows.float(), "sum", lengths=lengths, axis=0, initial=0, unsafe=True)
        return summed.to(rows.dtype)


def forward(
    function: Activation, groups: Groups, rows: Tensor, factors: Tensor | None, up: Tensor, down: Tensor,
    up_bias: Tensor | None, down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """What experts compute of their ``rows`` [n, H], times ``factors`` [n], if there are any.

    The factors multiply the operand of the second product: it is narrower than the result."""
    hidden = function(groups.linear(rows, up, up_bias))
    result = groups.times(_scaled(hidden, factors), down.transpose(1, 2))
    return result if down_bias is None else result.add_(_scaled(down_bias[groups.expert], factors))


def _scaled(rows: Tensor, factors: Tensor | None) -> Tensor:
    """Each of the ``rows`` [n, N] times its factor, in the dtype of the rows; computed in that of both."""
    return rows if factors is None else (rows * factors[:, None]).to(rows.dtype)


@dataclass(frozen=True)
class Backward:
    """Gradients of rows [n, H], of the factors [n] of their results, of the matrices, and of the biases (empty [0]
    where there is none)."""

    rows: Tensor
    factors: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor
    down_bias: Tensor

    @property
    def of_experts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of the matrices and biases."""
        return self.up, self.down, self.up_bias, self.down_bias


def backward(
    function: Activation, groups: Groups, rows: Tensor, grad_out: Tensor, factors: Tensor, up: Tensor, down: Tensor,
    up_bias: Tensor | None, down_bias: Tensor | None,
) -> Backward:  # fmt: skip
    """All gradients, given those of the weighted results, ``grad_out`` [n, H], and their weights, ``factors`` [n].

    The gradient of a factor is the product of ``grad_out`` and a result: that of what the second product takes from
    both sides, so that the result itself is not computed again."""
    before = groups.linear(rows, up, up_bias)
    hidden, grad_hidden = function(before), groups.times(grad_out, down)
    grad_factors = (grad_hidden * hidden).sum(-1)
    if down_bias is not None:
        grad_factors = grad_factors + (grad_out * down_bias[groups.expert]).sum(-1)
    grad_before = function.gradient(before, _scaled(grad_hidden, factors))
    return Backward(
        rows=groups.times(grad_before, up),
        factors=grad_factors.to(factors.dtype),
        up=laid_out(groups.inner(grad_before, rows), up),
        down=laid_out(groups.inner(grad_out, _scaled(hidden, factors)), down),
        up_bias=rows.new_zeros(0) if up_bias is None else groups.sums(grad_before),
        down_bias=rows.new_zeros(0) if down_bias is None else groups.sums(_scaled(grad_out, factors)),
    )
