"""Stacks of small equal blocks, and what may happen between these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block of a dozen operations."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        inner = torch.tanh(self.up(self.norm(x)) * factor) ** 2
        return x + torch.sigmoid(self.down(inner.exp().sin())) * self.scale


class Stack(nn.Module):
    """Eight blocks; what happens between them is up to subclasses."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(8))

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = self.step(index, block, x)
        return x

    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        return (self.run(x * 2) ** 2).mean()


class OneDiffers(Stack):
    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return block(x, 2.0) if index == 5 else block(x)


class Skips(Stack):
    """Each block also takes what the one before the last returned, as a U-Net's halves do."""

    def run(self, x: Tensor) -> Tensor:
        known = [x, x]
        for block in self.blocks:
            known.append(block(known[-1] + known[-2] * 0.5) + known[-3 if len(known) > 3 else -1])
        return known[-1]


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
        self.blocks[4].norm.weight = self.blocks[5].norm.bias  # type: ignore[union-attr]


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[:3].requires_grad_(False)


class Transposed(Stack):
    """Blocks whose results and gradients do not lie in memory in the order of their dims."""

    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return block(x.t().contiguous().t())
