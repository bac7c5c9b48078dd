"""Mixture-of-experts blocks: gated and not, with biases and without, fewer choices than experts, uneven everything."""

from __future__ import annotations

import torch

from autopar.trace.moe_blocks import activation_text

from .harness import Sample
from .random_tensors import floats, integers, permutations


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _clamped(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(max=0.7), up.clamp(min=-0.7, max=0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _samples(tokens: int, count: int, chosen: int, gate: bool, bias: bool, skew: bool = False) -> list[Sample]:
    """Width 6, hidden 5; ``skew`` sends all tokens to the first experts, and one choice nowhere."""
    x, grad, weights = floats(tokens, 6), floats(tokens, 6), floats(tokens, chosen)
    ids = integers(chosen, tokens, chosen) if skew else permutations(count, tokens, chosen)
    if skew:
        ids[0, 0] = count
    rows = 10 if gate else 5
    up, down = floats(count, rows, 6), floats(count, 6, 5)
    up_bias, down_bias = (floats(count, rows), floats(count, 6)) if bias else (None, None)
    function = (_clamped if bias else _swiglu) if gate else torch.nn.functional.relu
    act = activation_text(function, rows, torch.float32)
    operands = (x, ids, weights, up, down, up_bias, down_bias, act, count, 0)
    return [Sample("autopar.experts.default", operands), Sample("autopar.experts_backward.default", (grad, *operands))]


SAMPLES = [
    *_samples(12, 4, 2, gate=True, bias=False),
    *_samples(7, 8, 3, gate=True, bias=True),
    *_samples(9, 5, 1, gate=False, bias=False),
    *_samples(5, 4, 2, gate=False, bias=True, skew=True),
]
