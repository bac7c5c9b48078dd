"""Heads of attention that is written out in products are counted as those of one operation are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.planner.roles.divides import check_tensor, heads_and_experts, written_heads
from autopar.planner.step_graphs import bare_step_graph
from tests.helpers.planning import make_request

HEADS, WIDTH, BATCH, LENGTH = 6, 24, 4, 8


class Attention(nn.Module):
    """Self-attention between two projections, whose scores and probabilities are computed as ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._divided(part) for part in (self.q(x), *self.kv(x).chunk(2, -1)))
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        if self.kind == "mask":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
        elif self.kind == "einsum":
            mixed = torch.einsum("bhst,bhtd->bhsd", torch.einsum("bhsd,bhtd->bhst", q, k).softmax(-1), v)
        elif self.kind == "linear":
            mixed = q.exp() @ (k.mT @ v)
        else:
            mixed = (q @ k.mT).masked_fill(hidden, -torch.inf).float().softmax(-1) @ v
        mixed = mixed.transpose(1, 2).flatten(2) if mixed.dim() == 4 else mixed
        return self.out(mixed).square().mean()

    def _divided(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "without heads":
            return x
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def check(kind: str, tensor: int) -> None:
    request = make_request(Attention(kind), (torch.randn(BATCH, LENGTH, WIDTH),), (tensor,))
    graph = bare_step_graph(request.graph, request.loss, request.batch)
    operations = dict(heads_and_experts(graph))
    check_tensor({**operations, **dict(written_heads(graph))}, tensor, Layout(tensor=tensor), advised=True)
    # The emulator prices the rank with most heads, where attention is no operation of its own.
    assert len(operations) == (kind == "mask")


@pytest.mark.parametrize("kind", ["written", "einsum", "mask"])
def test_heads_that_do_not_divide_are_named(kind: str) -> None:
    with pytest.raises(
        OptionsError, match="has 6 heads, which do not divide among 4 tensor ranks; tensor=3 and tensor=6 do"
    ):
        check(kind, 4)


@pytest.mark.parametrize(("kind", "tensor"), [("written", 3), ("mask", 6), ("without heads", 2), ("linear", 4)])
def test_what_divides_or_has_no_heads_passes(kind: str, tensor: int) -> None:
    check(kind, tensor)
