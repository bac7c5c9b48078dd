"""A mixture-of-experts block as one operation, ``autopar.experts``, and its gradient, ``autopar.experts_backward``.

Tokens [T, H] go to k of E experts each; an expert is two matrices with an activation between them, which may gate::

    out[t] = sum over j of weights[t, j] * (act(x[t] @ up[e].T + up_bias[e]) @ down[e].T + down_bias[e]),  e = ids[t, j]

Why one operation: between the two matrices there is one row per choice of a token, in an order, and on a device that
holds some of the experts in a number, that depend on values. Here these rows exist only inside: no token is ever
dropped, nothing is padded, and shapes outside are fixed. Backward computes the hidden rows again, so nothing but its
operands is saved.

The operation takes the experts ``first <= e < first + up.shape[0]`` and gives what they contribute, so that on devices
which hold different experts it gives a Partial(sum). ``count`` is E, of which only the price depends. ``act`` is the
activation as a text, see :class:`Activation`. An id out of range is a choice of nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# An expert (counted from ``first``), the choices [n] that went to it, and their tokens [n].
Group = tuple[int, Tensor, Tensor]


@dataclass(frozen=True)
class Activation:
    """A function of a tensor [n, F] and its gradient, each as a list of ATen operations ``[op, args, kwargs]``.

    In arguments, ``{"value": i}`` is operand i, or, counted on, what an operation gave, with ``"item": j`` of a list;
    ``{"dtype": name}`` is a dtype, ``{"rows": true}`` n and ``{"device": true}`` where the operands are. The last
    operation gives the result. The operands are x, and for the gradient also that of the result. Text form:
    ``[forward, backward]`` in JSON.
    """

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Activation:
        forward, backward = json.loads(text)
        return Activation(tuple(forward), tuple(backward))

    def __call__(self, x: Tensor) -> Tensor:
        return _run(self.forward, x)

    def gradient(self, x: Tensor, of_result: Tensor) -> Tensor:
        """The gradient of ``x``, given that of the result."""
        return _run(self.backward, x, of_result)


def _run(steps: tuple[Any, ...], *operands: Tensor) -> Tensor:
    known: list[Any] = list(operands)
    for op, args, kwargs in steps:
        namespace, name, overload = op.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        filled = [_fill(arg, known) for arg in args]
        known.append(function(*filled, **{key: _fill(arg, known) for key, arg in kwargs.items()}))
    result: Tensor = known[-1]
    return result


def _fill(arg: Any, known: list[Any]) -> Any:
    if isinstance(arg, list):
        return [_fill(item, known) for item in arg]
    if not isinstance(arg, dict):
        return arg
    if "dtype" in arg:
        return getattr(torch, arg["dtype"])
    if "rows" in arg:
        return known[0].shape[0]
    if "device" in arg:
        return known[0].device
    value = known[arg["value"]]
    return value[arg["item"]] if "item" in arg else value


def _groups(ids: Tensor, first: int, experts: int) -> Iterator[Group]:
    """The choices [T * k] of each expert held here that has any, in the order of the tokens."""
    local = ids.reshape(-1) - first
    local = torch.where((local >= 0) & (local < experts), local, experts)
    order = torch.argsort(local, stable=True)
    ends = torch.bincount(local, minlength=experts + 1).cumsum(0).tolist()
    for expert, (start, end) in enumerate(zip([0, *ends[: experts - 1]], ends[:experts], strict=True)):
        if start < end:
            chosen = order[start:end]
            yield expert, chosen, chosen // ids.shape[-1]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return torch.nn.functional.linear(x, weight[expert], None if bias is None else bias[expert])


@torch.library.custom_op("autopar::experts", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    act: str, count: int, first: int,
) -> Tensor:  # fmt: skip
    """``x`` [T, H], ``ids`` and ``weights`` [T, k], ``up`` [E, F, H], ``down`` [E, H, I] -> [T, H]."""
    function, out = Activation.parse(act), torch.zeros_like(x)
    flat = weights.reshape(-1)
    for expert, chosen, tokens in _groups(ids, first, up.shape[0]):
        hidden = function(_linear(x[tokens], up, up_bias, expert))
        rows = _linear(hidden, down, down_bias, expert) * flat[chosen, None]
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
    function, flat = Activation.parse(act), weights.reshape(-1)
    of_x, of_weights = torch.zeros_like(x), torch.zeros_like(flat)
    of_up, of_down = torch.zeros_like(up), torch.zeros_like(down)
    of_up_bias, of_down_bias = _zeros(up_bias, up), _zeros(down_bias, down)
    for expert, chosen, tokens in _groups(ids, first, up.shape[0]):
        rows, of_out = x[tokens], grad[tokens]
        before = _linear(rows, up, up_bias, expert)
        hidden = function(before)
        of_weights[chosen] = (of_out * _linear(hidden, down, down_bias, expert)).sum(-1).to(flat.dtype)
        of_rows = (of_out * flat[chosen, None]).to(down.dtype)
        of_down[expert] = of_rows.t() @ hidden
        of_hidden = function.gradient(before, of_rows @ down[expert])
        of_up[expert] = of_hidden.t() @ rows
        of_x.index_add_(0, tokens, (of_hidden @ up[expert]).to(x.dtype))
        if up_bias is not None:
            of_up_bias[expert] = of_hidden.sum(0)
        if down_bias is not None:
            of_down_bias[expert] = of_rows.sum(0)
    return of_x, of_weights.view_as(weights), of_up, of_down, of_up_bias, of_down_bias


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
    found = experts_backward(grad, x, ids, weights, up, down, up_bias, down_bias, *context.options)
    of_up_bias, of_down_bias = (
        None if bias is None else of for bias, of in zip((up_bias, down_bias), found[4:], strict=True)
    )
    return found[0], None, found[1], found[2], found[3], of_up_bias, of_down_bias, None, None, None


experts.register_autograd(_differentiate, setup_context=_save)


# These are in traced graphs, so torch knows them too.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "autopar.experts.default": experts,
    "autopar.experts_backward.default": experts_backward,
}
