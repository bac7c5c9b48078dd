"""Products whose rows are misaligned: in fp8 no library multiplies them, in 16 bits slower kernels do."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import nn

from autopar.cluster.description import Cluster
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.sections.expert_all_to_all import Block
from benchmarks.emulator.sections.kernel_seconds import MISALIGNED
from benchmarks.emulator.sections.section import Section
from tests.helpers.recipes import block_cost, layout_of

H100 = Cluster.get("dgx-h100")
ROWS = 16384


class Layer(nn.Module):
    """A product of activations and two of weights, the inner one ``width`` wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2048, width, bias=False), nn.Linear(width, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Deep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Scores(nn.Module):
    """A batch of products of activations, whose rows are as long as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return (y @ y.transpose(1, 2)).float().mean()


@cache
def layer(width: int, precision: str = "bf16", tensor: int = 1, cluster: str = "dgx-h100", rows: int = ROWS) -> Section:
    with torch.device("meta"):
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        model = LayoutModel.of(Deep(width).to(dtype), (torch.empty(1, rows, 2048, dtype=dtype),))
    return model.sections(layout_of(tensor=tensor, precision=precision), Cluster.get(cluster)).layers[1]  # type: ignore[arg-type]


def test_what_cannot_be_multiplied_in_fp8_is_in_bf16() -> None:
    """8200 is a multiple of 8 and not of 16: rows that are aligned in bf16 and not in fp8, on one device or on two."""
    assert layer(8208, "fp8").forward.compute < 0.8 * layer(8208).forward.compute
    assert layer(8200, "fp8").forward == layer(8200).forward
    assert layer(8200, "fp8").backward == layer(8200).backward
    assert layer(16400, "fp8", 2).forward == layer(16400, "bf16", 2).forward
    assert layer(16416, "fp8", 2).forward.compute < 0.8 * layer(16416, "bf16", 2).forward.compute


def test_any_number_of_tokens_is_multiplied_in_fp8_but_not_summed_over() -> None:
    """Tokens are rows of what a product takes first, but for weights' gradients, of which bf16 does one of each two
    products of backward."""
    even, odd, plain = layer(8192, "fp8"), layer(8192, "fp8", rows=ROWS + 8), layer(8192, rows=ROWS + 8)
    assert odd.forward.compute == pytest.approx(even.forward.compute, rel=0.01)
    assert odd.forward.compute < 0.8 * plain.forward.compute
    assert 1.1 * even.backward.compute < odd.backward.compute < 0.9 * plain.backward.compute


def test_any_number_of_tokens_is_aligned_where_rows_are() -> None:
    """Weights' gradients sum over tokens, which lie side by side in none of their operands."""
    even, odd = layer(8192), layer(8192, rows=ROWS - 1)
    assert odd.forward.compute == pytest.approx(even.forward.compute, rel=0.02)
    assert odd.backward.compute == pytest.approx(even.backward.compute, rel=0.02)


def test_weights_gradients_are_slower_where_rows_are_misaligned() -> None:
    """All three products of a weight read or write rows as long as it is wide, though the gradient's sums are as long
    as there are tokens."""
    slower = layer(8193).backward.compute / layer(8192).backward.compute
    assert slower == pytest.approx(MISALIGNED["aten.mm.default"], rel=0.1)


def test_experts_that_cannot_be_multiplied_in_fp8_are_in_bf16() -> None:
    block = Block(64000.0, 8, 8, 4096, 8192, 4096, 2, 32000, 2)
    for width, differs in ((8192, True), (8200, False)):
        plain, cast = (
            block_cost(dataclasses.replace(block, up=width), layout_of(precision=p), H100) for p in ("bf16", "fp8")
        )  # type: ignore[arg-type]
        assert (plain != cast) is differs


def test_misaligned_rows_are_slower_in_16_bits_on_matrix_units() -> None:
    """As much as documented, whatever the product; not where there are no such units, and not in 32 bits."""
    slower = layer(8193).forward.compute / layer(8192).forward.compute
    assert slower == pytest.approx(MISALIGNED["aten.mm.default"], rel=0.1) and slower < 4
    assert layer(8193, "fp8").forward == layer(8193).forward
    for precision, cluster in (("fp32", "dgx-h100"), ("bf16", "tpu-v4")):
        plain, odd = (layer(width, precision, 1, cluster).forward.compute for width in (8192, 8193))
        assert odd == pytest.approx(plain, rel=0.05)


def test_batched_products_are_slower_still() -> None:
    """Attention that is spelled out, on which their factor was fitted."""

    def seconds(rows: int) -> float:
        with torch.device("meta"):
            model = LayoutModel.of(Scores().bfloat16(), (torch.empty(4, rows, 2048, dtype=torch.bfloat16),))
        sections = model.sections(Layout(), H100)
        return sum(section.forward.compute for section in sections.every)

    assert seconds(4097) > 3 * seconds(4096)
