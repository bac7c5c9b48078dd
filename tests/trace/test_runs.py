"""Equal calls in a row are one operation of what torch traces, as long as each hands all its gradients to the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.marks import slow_rows_but
from tests.helpers.outlined import assert_same, request_for, runs_of
from tests.helpers.stacks import Block, Frozen, OneDiffers, Skips, Stack, Tied, Transposed


class Strided(Block):
    """Its result does not lie in memory as its gradient will."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(x, factor).t().contiguous().t()


class Strides(Stack):
    block = Strided


class Buffered(Block):
    """Reads a buffer of its own, and one of the whole model."""

    shared: Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.register_buffer("own", torch.ones(width))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(x * self.own, factor) + self.shared


class Buffers(Stack):
    """Blocks that read buffers; a subclass writes to that of all."""

    block = Buffered

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shared", torch.zeros(6))
        for block in self.blocks:
            block.shared = self.shared  # type: ignore[assignment]


class WritesBefore(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        self.shared.add_(1)
        return super().forward(x)


class ReadsAfter(Stack):
    """A parameter of a block also takes part in the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[4].scale.sum()  # type: ignore[union-attr,operator]


# How many calls each run has: another operation, or a gradient that has a second part, ends one.
RUNS: list[tuple[type[Stack], list[int]]] = [
    (Buffers, [7]), (ReadsAfter, [3, 4]), (Strides, [1] * 7), (WritesBefore, [7]),
    (Stack, [7]), (OneDiffers, [4, 2]), (Frozen, [3, 4]), (Skips, [1] * 7), (Tied, [1] * 7), (Transposed, [1] * 7),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "runs"), slow_rows_but((0, 1), RUNS), ids=lambda value: getattr(value, "__name__", "")
)
def test_calls_in_a_row_are_one_operation(kind: type[Stack], runs: list[int]) -> None:
    model, batch = kind(), (torch.randn(4, 6),)
    assert runs_of(request_for(model, batch))[0] == runs
    assert assert_same(model, batch) == sum(runs)


def test_what_torch_traces_does_not_grow_with_the_number_of_layers() -> None:
    models = Stack(), Stack()
    models[1].blocks.extend(Block() for _ in range(8))
    (short, nodes), (long, as_many) = (runs_of(request_for(model, (torch.randn(4, 6),))) for model in models)
    assert (short, long) == ([7], [15])
    assert nodes == as_many
