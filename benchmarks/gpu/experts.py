"""The part ``experts``: blocks of experts of the sizes of published mixtures, forward and backward, in bf16 on one GPU.

Rows are computed in groups by one kernel, and expert by expert (:mod:`autopar.ops.experts` has both); the second says
what the first must equal. Routers choose all experts equally often (``even``), or some far more often (``skewed``: by
Zipf's law). The predictions are those of a plan (``node_seconds``). Seconds contain the host's launches, as steps do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autopar.calibration.default_cluster import default_cluster
from autopar.cost import node_seconds
from autopar.ir.node import TensorType
from autopar.ops import experts as operation
from autopar.trace.moe_blocks import activation_text

from .setting import Row, Setting
from .small_model import compared

# How far a result may be from that expert by expert, relative to the largest element: both round to bf16 (3.9e-3), at
# other places. Chosen: ten units.
TOLERANCE = 4e-2
REPEATS = 5
# What is compared: the result, and gradients.
RESULTS = ("result", "x", "weights", "up", "down", "up_bias", "down_bias")


@dataclass(frozen=True)
class Block:
    """``held`` of ``count`` experts, which gate, of ``width`` and ``inner`` features; tokens choose ``chosen``."""

    tokens: int
    count: int
    held: int
    chosen: int
    width: int
    inner: int
    biases: bool = False


# Sizes of the models' layers; `held` as on one of eight expert ranks, whose tokens have all been gathered.
BLOCKS: Mapping[str, Block] = {
    "mixtral-8x7b": Block(8192, 8, 8, 2, 4096, 14336),
    "mixtral-8x7b-of-8": Block(65536, 8, 1, 2, 4096, 14336),
    "qwen3-30b": Block(8192, 128, 128, 8, 2048, 768),
    "qwen3-30b-of-8": Block(32768, 128, 16, 8, 2048, 768),
    "gpt-oss-20b": Block(8192, 32, 32, 4, 2880, 2880, biases=True),
    "deepseek-v3-of-64": Block(32768, 256, 4, 8, 7168, 2048),
}
TINY_BLOCKS: Mapping[str, Block] = {"tiny": Block(64, 8, 8, 2, 16, 24, biases=True)}


def cases(setting: Setting) -> list[str]:
    return [f"{name} {router}" for name in (TINY_BLOCKS if setting.tiny else BLOCKS) for router in ("even", "skewed")]


def run(case: str, setting: Setting) -> list[Row]:
    """Rows for both ways, with forward and backward."""
    name, router = case.split(" ")
    block = {**BLOCKS, **TINY_BLOCKS}[name]
    operands = make(block, router, setting)
    grad = torch.randn_like(operands[0])
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "grouped": nullcontext,
        "one by one": lambda: patch.object(operation, "can_group", lambda *_: False),
    }
    results, rows = {}, []
    for way, chosen in ways.items():
        with chosen():
            results[way] = operation.experts(*operands), *operation.experts_backward(grad, *operands)
            seconds = [
                setting.seconds(lambda: operation.experts(*operands), REPEATS),
                setting.seconds(lambda: operation.experts_backward(grad, *operands), REPEATS),
            ]
        rows.append({"case": f"{case} {way}", "seconds": seconds, **predicted(operands, grad, setting)})
    named = {way: dict(zip(RESULTS, each, strict=True)) for way, each in results.items()}
    expected = {name: value for name, value in named["one by one"].items() if value.numel()}
    rows[0] |= compared(named["grouped"], expected, TOLERANCE)
    return rows


def make(block: Block, router: str, setting: Setting) -> tuple[Any, ...]:
    """The operands of the operation, from the same numbers every time."""
    generator = torch.Generator(setting.device).manual_seed(0)
    dtype = torch.bfloat16

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=setting.device).mul_(shape[-1] ** -0.5).to(dtype)

    often = torch.ones(block.count, device=setting.device)
    if router == "skewed":
        often = 1 / torch.arange(1, block.count + 1, device=setting.device)
    ids = torch.multinomial(often.expand(block.tokens, -1), block.chosen, generator=generator)
    act = activation_text(_gated, 2 * block.inner, dtype)
    up_bias, down_bias = some(block.held, 2 * block.inner), some(block.held, block.width)
    biases = (up_bias, down_bias) if block.biases else (None, None)
    up, down = some(block.held, 2 * block.inner, block.width), some(block.held, block.width, block.inner)
    return (
        some(block.tokens, block.width),
        ids,
        some(block.tokens, block.chosen),
        up,
        down,
        *biases,
        act,
        block.count,
        0,
    )


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def predicted(operands: tuple[Any, ...], grad: Tensor, setting: Setting) -> Row:
    """What a plan says of the operation, forward and backward."""
    cluster, seconds = default_cluster(setting.kind, 1), []
    x, _, weights, up, down, *rest = operands
    for name, given, outputs in (
        ("experts", operands, (x,)),
        ("experts_backward", (grad, *operands), (x, weights, up, down, *rest[:2])),
    ):
        call = SimpleNamespace(op=f"autopar.{name}.default", args=given, kwargs={}, module="")
        seconds.append(node_seconds(cluster, call, _types(given), _types(outputs)))
    return {"predicted_seconds": seconds}


def _types(values: tuple[Any, ...]) -> tuple[TensorType, ...]:
    return tuple(TensorType(tuple(v.shape), v.dtype) for v in values if isinstance(v, Tensor))
