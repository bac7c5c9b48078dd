"""Operations of a library of their own, as users define them; importing this registers them as ``probing::...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

op = torch.library.custom_op


def _like(fake: Any, *shapes_of: int) -> None:
    """Results like the operands at these positions."""

    def make(*args: Any) -> Any:
        made = tuple(torch.empty_like(args[i]) for i in shapes_of)
        return made[0] if len(made) == 1 else made

    fake.register_fake(make)


@op("probing::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.5 * x)


@op("probing::row_softmax", mutates_args=())
def row_softmax(x: Tensor, dim: int, temperature: float) -> Tensor:
    return torch.softmax(x / temperature, dim)


@op("probing::of_width", mutates_args=())
def of_width(x: Tensor, width: int) -> Tensor:
    """Centres rows, whose length must be as the argument says."""
    if x.shape[-1] != width:
        raise ValueError(f"rows have {x.shape[-1]} entries, not {width}")
    return x - x.sum(-1, keepdim=True) / width


@op("probing::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias))


@op("probing::linear_gelu_backward", mutates_args=())
def linear_gelu_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    inner = torch.ops.aten.gelu_backward(grad, functional.linear(x, weight, bias))
    rows = inner.reshape(-1, inner.shape[-1])
    return [inner @ weight, rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0)]


linear_gelu.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))
linear_gelu_backward.register_fake(lambda grad, x, weight, bias: [torch.empty_like(t) for t in (x, weight, bias)])
linear_gelu.register_autograd(
    lambda ctx, grad: tuple(torch.ops.probing.linear_gelu_backward(grad, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@op("probing::plain_linear", mutates_args=())
def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


plain_linear.register_fake(lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]))


@op("probing::scale_all", mutates_args=())
def scale_all(xs: list[Tensor], factors: list[float]) -> list[Tensor]:
    return [x * f for x, f in zip(xs, factors, strict=True)]


scale_all.register_fake(lambda xs, factors: [torch.empty_like(x) for x in xs])


@op("probing::normed", mutates_args=())
def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length one, and their lengths."""
    length = x.square().sum(-1).sqrt()
    return x / length.unsqueeze(-1), length


normed.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[:-1])))


@op("probing::take_rows", mutates_args=())
def take_rows(table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Rows of the table where the mask says so, zero elsewhere; refuses an index outside of it."""
    if bool((index < 0).any()) or bool((index >= table.shape[0]).any()):
        raise IndexError("no such row")
    return table[index] * mask.unsqueeze(-1)


take_rows.register_fake(lambda table, index, mask: table.new_empty(*index.shape, table.shape[1]))


@op("probing::segment_sum", mutates_args=())
def segment_sum(x: Tensor, segment: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, x.shape[1]).index_add(0, segment, x)


segment_sum.register_fake(lambda x, segment, count: x.new_empty(count, x.shape[1]))


@op("probing::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws, and does not say so."""
    return x + torch.rand_like(x)


@op("probing::tagged_noise", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def tagged_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@op("probing::sly", mutates_args=())
def sly(x: Tensor) -> Tensor:
    """Writes into its operand, and does not say so."""
    x.add_(1)
    return x * 2


@op("probing::increment", mutates_args=("x",))
def increment(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@op("probing::gated", mutates_args=())
def gated(x: Tensor) -> Tensor:
    """Pointwise, but for one bit that depends on all of it."""
    return x * (2 if float(x.sum()) > 37.0 else 1)


@op("probing::tame", mutates_args=())
def tame(x: Tensor) -> Tensor:
    """A sum, as long as numbers are small."""
    return x.sum(0).clamp(-1000, 1000)


@op("probing::nearly_linear", mutates_args=())
def nearly_linear(x: Tensor) -> Tensor:
    found = x.sum(0)
    return found + 1e-5 * found * found.abs()


nearly_linear.register_fake(lambda x: x.new_empty(x.shape[1:]))
tame.register_fake(lambda x: x.new_empty(x.shape[1:]))


@op("probing::small_identity", mutates_args=())
def small_identity(x: Tensor) -> Tensor:
    """Nothing to fewer than 200 rows, a cumulative sum to more."""
    return x.clone() if x.shape[0] < 200 else x.cumsum(0)


@op("probing::crashing", mutates_args=())
def crashing(x: Tensor) -> Tensor:
    import os

    os.abort()


@op("probing::hanging", mutates_args=())
def hanging(x: Tensor) -> Tensor:
    while True:
        pass


@op("probing::for_gpus", mutates_args=(), device_types="cuda")
def for_gpus(x: Tensor) -> Tensor:
    return x * 2


for _operation in (swish, row_softmax, of_width, noisy, tagged_noise, sly, increment, gated, small_identity):
    _like(_operation, 0)
for _operation in (crashing, hanging, for_gpus):
    _like(_operation, 0)


class Fused(nn.Module):
    """Two fused layers and a loss; all of its work is in operations nobody knows."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.probing.linear_gelu(x, self.up.weight, self.up.bias)
        y = torch.ops.probing.linear_gelu(y, self.down.weight, self.down.bias)
        return y.square().mean()
