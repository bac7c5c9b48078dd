"""What a section has in memory for a moment, beside what it keeps for backward."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost.kernels.grouping import find_kernels
from autopar.cost.kernels.kernel import Kernels
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.sections.transient_memory import Span, most
from benchmarks.published_models import build
from benchmarks.published_shape import Shape
from benchmarks.recipes import Recipe

A100 = Cluster.get("dgx-a100-80gb")
SHAPE = Shape(2, 128, 4, 4, 32, 512, gated=False, vocab=8192, seq=256, flash=True)
LOGITS = SHAPE.seq * SHAPE.vocab


@cache
def model() -> LayoutModel:
    ids = torch.empty(8, SHAPE.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(SHAPE), (ids, ids))


def kernels(text: str) -> Kernels:
    graph = Graph.from_text("graph()\n" + text)
    return find_kernels(graph, lambda *_: False, lambda _: False, lambda value: int(graph.type_of(value).bytes))


def test_the_most_at_once() -> None:
    assert most([], 3) == 0
    assert most([Span(0, 0, 4), Span(1, 1, 3), Span(1, 2, 2)], 3) == 5


def test_a_fused_loss_makes_the_gradient_of_logits_and_nothing_else() -> None:
    """Kept are the logits in bf16; backward writes their gradient, with gradients of the head and the norm."""
    after = model().sections(Layout(), A100).after
    assert after.saved == pytest.approx(2 * LOGITS, rel=0.06)
    assert after.working == pytest.approx(2 * LOGITS, rel=0.06)


def test_a_loss_operation_by_operation_makes_copies_in_fp32() -> None:
    """The log-softmax is kept in fp32, and backward has several as large at once."""
    after = model().sections(Recipe(eager=("loss",)), A100).after
    assert after.saved == pytest.approx(4 * LOGITS, rel=0.06)
    assert 8 * LOGITS < after.working <= 16.5 * LOGITS


def test_what_is_kept_is_not_counted_twice() -> None:
    """A layer's transients are a few of its largest results, less than all that it keeps."""
    layer = model().sections(Layout(), A100).layers[1]
    widest = SHAPE.seq * SHAPE.ffn * 2
    assert widest <= layer.working < 3 * widest < layer.saved


def test_what_runs_before_layers_run_backward_is_gone_then() -> None:
    """Logits and a layer computed again are never there at once: the larger counts."""
    sections = model().sections(Layout(recompute="full"), A100)
    held = model().price(Layout(recompute="full"), A100).held[0]
    layer = max(one.saved + one.working for one in sections.layers)
    assert held.working == max(layer, sections.after.saved + sections.after.working)


def test_under_gpipe_all_microbatches_keep_their_logits() -> None:
    """Backward of the loss follows its forward at once but where all microbatches run forward first."""
    held = {
        schedule: model().price(Layout(pipeline=2, schedule=schedule, recompute="full"), A100).held[-1]
        for schedule in ("1f1b", "gpipe")
    }
    after, layer = model().sections(Layout(), A100).after, model().sections(Layout(), A100).layers[-1]
    # Two microbatches are in flight on the last rank under neither: eight samples, eight microbatches.
    more = held["gpipe"].activations - held["1f1b"].activations
    assert more == pytest.approx(7 * (after.saved_last + layer.entry), rel=0.05)


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_callers_hold_is_kept(tensor: int) -> None:
    """All logits in bf16, gathered, beside what backward reads of them."""
    plain, holding = (
        model()
        .sections(Recipe(tensor=tensor, replicated=("loss",), eager=("loss",), retained_inputs=holds), A100)
        .after
        for holds in ((), ("loss",))
    )
    assert holding.saved - plain.saved == 2 * LOGITS == holding.saved_last - plain.saved_last


def test_what_products_take_is_kept_whoever_holds_it() -> None:
    """Modules with weights of their own hold nothing new; the activation between them holds what it would remake."""
    plain, products, activation = (
        model().sections(Recipe(retained_inputs=holds), A100).layers[1].saved
        for holds in ((), ("*.mlp.*",), ("*.mlp",))
    )
    assert products == plain
    assert activation - plain == SHAPE.seq * SHAPE.ffn * 2


class Between(torch.nn.Module):
    """Operations between layers, which belong to none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.gain = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.gain
        return x.square().mean()


def test_what_is_kept_between_layers_stays_while_they_run_backward() -> None:
    """What only the loss keeps goes first; with it the results of layers and their sums do not."""
    decoder = model().sections(Layout(recompute="full"), A100)
    assert decoder.after.saved_last == decoder.after.saved and decoder.before.saved_last == 0
    between = LayoutModel.of(Between(), (torch.empty(256, 64),))
    layout = Layout(precision="fp32", recompute="full")
    after = between.sections(layout, A100, 256).after
    assert after.saved_last < after.saved
    held = between.price(layout, A100).held[0]
    assert held.activations >= after.saved - after.saved_last


def test_kernels_run_after_those_whose_results_they_read() -> None:
    found = kernels(
        '%x: f32[64, 64] = input("x")\n'
        "%s: f32[64, 64] = aten.exp.default(%x)\n"
        "%c: f32[64, 64] = aten.mm.default(%x, %x)\n"
        "%t: f32[64, 64] = aten.add.Tensor(%s, %c)\n"
        'return output "0" = %t\n'
    )
    made = [value for kernel in found.kernels for value in kernel.writes]
    assert made[-1] == Value("t")


def test_constants_are_made_where_they_are_used() -> None:
    """Of a number put into a constant at given places nothing is written: the kernel that reads it compares places."""
    found = kernels(
        '%x: f32[64, 512] = input("x")\n'
        '%at: i64[64, 1] = input("at")\n'
        "%zeros: f32[64, 512] = aten.full.default([64, 512], 0)\n"
        "%hot: f32[64, 512] = aten.scatter.value(%zeros, 1, %at, -1)\n"
        "%e: f32[64, 512] = aten.exp.default(%x)\n"
        "%sum: f32[64, 512] = aten.add.Tensor(%e, %hot)\n"
        'return output "0" = %sum\n'
    )
    assert [[node.name for node in kernel.nodes] for kernel in found.kernels] == [["zeros", "hot", "e", "sum"]]
    assert found.kernels[0].writes == (Value("sum"),)
