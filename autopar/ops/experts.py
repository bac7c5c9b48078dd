"""A mixture-of-experts block as one operation, ``autopar.experts``, and its gradient, ``autopar.experts_backward``.

Each of the tokens [T, H] is routed to k of E experts; an expert is two matrices with an activation between them, which
may gate::

    out[t] = sum over j of weights[t, j] * (act(x[t] @ up[e].T + up_bias[e]) @ down[e].T + down_bias[e]),  e = ids[t, j]

Why one operation: between the two matrices there is one row per choice of a token. The order of these rows, and on a
device that holds some of the experts their number, depend on values. Here these rows exist only inside: no token is
dropped, nothing is padded, and shapes outside are fixed. Backward recomputes the hidden rows, so only the operands are
saved.

The operation takes the experts ``first <= e < first + up.shape[0]`` and returns what they contribute, so that the
results of devices which hold different experts are a Partial(sum). ``count`` is E; only the price depends on it.
``act`` is the activation as text, see :class:`.activation.Activation`. An id out of range chooses no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import grouped_experts
from .activation import Activation
from .grouped_experts import Groups, can_group, laid_out

# An expert (counted from ``first``), the choices [n] that went to it, and their tokens [n].
Group = tuple[int, Tensor, Tensor]


def _groups(ids: Tensor, first: int, experts: int) -> Iterator[Group]:
    """Yields the choices [T * k] that went to each expert held here, in the order of the tokens; skips experts without
    any."""
    order, bounds = _sorted(_local(ids, first, experts), experts)
    ends = bounds.tolist()
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if start < end:
            chosen = order[start:end]
            yield expert, chosen, chosen // ids.shape[-1]


def _local(ids: Tensor, first: int, experts: int) -> Tensor:
    """The choices [T * k] as numbers of experts held here, ``experts`` where another device holds the expert."""
    local = ids.reshape(-1) - first
    return torch.where((local >= 0) & (local < experts), local, experts)


def _sorted(local: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order of choices by expert, then by token; and where each expert's end [E], int32."""
    ordered, order = torch.sort(local, stable=True)
    numbers = torch.arange(experts, device=local.device)
    return order, torch.searchsorted(ordered, numbers, right=True, out_int32=True)


@dataclass(frozen=True)
class Chosen:
    """The ``choices`` [n] of experts held here, by expert, with their ``factors`` [n] and ``groups``. ``inside``: which
    of them choose an expert at all, if some might not; those have a row of zeros and a factor of 0."""

    choices: Tensor
    factors: Tensor
    groups: Groups
    inside: Tensor | None = None

    @staticmethod
    def of(ids: Tensor, weights: Tensor, first: int, experts: int, count: int) -> Chosen:
        """Where all ``count`` experts are here, nothing is read from the device, so the host need not wait for it."""
        if experts < count:
            order, ends = _sorted(_local(ids, first, experts), experts)
            choices = order[: int(ends[-1])]
            return Chosen(choices, weights.reshape(-1)[choices], Groups(ends, len(choices)))
        flat = ids.reshape(-1)
        local = flat.clamp(0, experts - 1)
        choices, ends = _sorted(local, experts)
        inside = (flat == local)[choices]
        factors = weights.reshape(-1)[choices].masked_fill(~inside, 0.0)
        return Chosen(choices, factors, Groups(ends, len(choices)), inside)

    def rows(self, x: Tensor, chosen: int) -> Tensor:
        """The rows [n, H] of the choices' tokens, of which each has ``chosen``."""
        rows = x[self.choices // chosen]
        return rows if self.inside is None else rows.masked_fill_(~self.inside[:, None], 0.0)

    def spread(self, factors: Tensor, like: Tensor) -> Tensor:
        """Numbers of choices [n] at their places in ``like`` [T, k], zero elsewhere."""
        spread = like.new_zeros(like.numel())
        spread[self.choices] = factors if self.inside is None else factors.masked_fill(~self.inside, 0.0)
        return laid_out(spread.view(like.shape), like)


def summed(rows: Tensor, choices: Tensor, chosen: int, like: Tensor) -> Tensor:
    """For each token of ``like`` [T, H] the sum of the ``rows`` [n, H] of its ``choices`` [n], in their order;
    ``chosen``: how many a token has. One kernel, which reads each row once and never adds in another order."""
    if not len(rows):
        return torch.zeros_like(like)
    ordered, order = torch.sort(choices)
    starts = torch.searchsorted(ordered, torch.arange(0, like.shape[0] * chosen, chosen, device=rows.device))
    bags: Tensor = torch.ops.aten._embedding_bag_forward_only.default(rows, order, starts)[0]
    return bags.to(like.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return torch.nn.functional.linear(x, weight[expert], None if bias is None else bias[expert])


@torch.library.custom_op("autopar::experts", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    act: str, count: int, first: int,
) -> Tensor:  # fmt: skip
    """``x`` [T, H], ``ids`` and ``weights`` [T, k], ``up`` [E, F, H], ``down`` [E, H, I] -> [T, H]."""
    function, chosen = Activation.parse(act), ids.shape[-1]
    if can_group(x, up, down):
        here = Chosen.of(ids, weights, first, up.shape[0], count)
        rows = here.rows(x, chosen)
        results = grouped_experts.forward(function, here.groups, rows, here.factors, up, down, up_bias, down_bias)
        return laid_out(summed(results, here.choices, chosen, x), x)
    out, flat = torch.zeros_like(x), weights.reshape(-1)
    for expert, choices, tokens in _groups(ids, first, up.shape[0]):
        rows = forward_rows(function, x[tokens], up, down, up_bias, down_bias, expert) * flat[choices, None]
        out.index_add_(0, tokens, rows.to(out.dtype))
    return out


@experts.register_fake
def _(x: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autopar::experts_backward", mutates_args=())
def experts_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, count: int, first: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, ``weights``, ``up``, ``down`` and the biases (empty [0] where there is none)."""
    flat = weights.reshape(-1)
    if can_group(x, up, down):
        return _grouped_backward(grad, x, ids, weights, up, down, up_bias, down_bias, act, count, first)
    grad_x, grad_weights = torch.zeros_like(x), torch.zeros_like(flat)
    sums, operands = Gradients.zeros(up, down, up_bias, down_bias), (up, down, up_bias, down_bias)
    function = Activation.parse(act)
    for expert, chosen, tokens in _groups(ids, first, up.shape[0]):
        grad_rows, grad_weights[chosen] = sums.add(function, *operands, x[tokens], grad[tokens], flat[chosen], expert)
        grad_x.index_add_(0, tokens, grad_rows)
    return grad_x, grad_weights.view_as(weights), *sums.tensors


def _grouped_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, count: int, first: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    here, chosen = Chosen.of(ids, weights, first, up.shape[0], count), ids.shape[-1]
    rows, grad_rows = here.rows(x, chosen), here.rows(grad, chosen)
    found = grouped_experts.backward(
        Activation.parse(act), here.groups, rows, grad_rows, here.factors, up, down, up_bias, down_bias
    )
    grad_x = laid_out(summed(found.rows, here.choices, chosen, x), x)
    return grad_x, here.spread(found.factors, weights), *found.of_experts


def forward_rows(
    function: Activation, rows: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    expert: int,
) -> Tensor:  # fmt: skip
    """What one expert computes of ``rows`` [n, H]."""
    return _linear(function(_linear(rows, up, up_bias, expert)), down, down_bias, expert)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the matrices and biases (empty [0] where there is none), filled expert by expert."""

    up: Tensor
    down: Tensor
    up_bias: Tensor
    down_bias: Tensor

    @staticmethod
    def zeros(up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None) -> Gradients:
        return Gradients(torch.zeros_like(up), torch.zeros_like(down), _zeros(up_bias, up), _zeros(down_bias, down))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.up, self.down, self.up_bias, self.down_bias

    def add(
        self, function: Activation, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
        rows: Tensor, grad_out: Tensor, factors: Tensor, expert: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Fills in those of one expert, given its ``rows`` [n, H], the gradients of their weighted results and their
        weights [n]. Returns the gradients of the rows and of their weights."""
        before = _linear(rows, up, up_bias, expert)
        hidden, grad_rows = function(before), (grad_out * factors[:, None]).to(down.dtype)
        # A weight's gradient is the product of grad_out and a result, here before the second matrix.
        unweighted = grad_out.to(down.dtype) @ down[expert]
        grad_factors = (unweighted * hidden).sum(-1)
        if down_bias is not None:
            grad_factors = grad_factors + (grad_out * down_bias[expert]).sum(-1)
        self.down[expert] = grad_rows.t() @ hidden
        grad_hidden = function.gradient(before, (unweighted * factors[:, None]).to(down.dtype))
        self.up[expert] = grad_hidden.t() @ rows
        if up_bias is not None:
            self.up_bias[expert] = grad_hidden.sum(0)
        if down_bias is not None:
            self.down_bias[expert] = grad_rows.sum(0)
        return (grad_hidden @ up[expert]).to(rows.dtype), grad_factors.to(factors.dtype)


def _zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    return weight.new_zeros(0) if bias is None else torch.zeros_like(bias)


@experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, *_rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    biases = (
        weight.new_empty(0) if bias is None else torch.empty_like(bias)
        for bias, weight in ((up_bias, up), (down_bias, down))
    )
    return (*map(torch.empty_like, (x, weights, up, down)), *biases)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _differentiate(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, ids, weights, up, down, up_bias, down_bias = context.saved_tensors
    gradients = experts_backward(grad, x, ids, weights, up, down, up_bias, down_bias, *context.options)
    grad_up_bias, grad_down_bias = (
        None if bias is None else grad_bias for bias, grad_bias in zip((up_bias, down_bias), gradients[4:], strict=True)
    )
    return gradients[0], None, gradients[1], gradients[2], gradients[3], grad_up_bias, grad_down_bias, None, None, None


experts.register_autograd(_differentiate, setup_context=_save)


# Traced graphs contain these, so they are also registered with torch.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "autopar.experts.default": experts,
    "autopar.experts_backward.default": experts_backward,
}
