"""Weights that several pipeline stages use: the first stores them, and the others borrow them once a step."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.cost.collective.point_to_point import message_rate
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.pricing import pricing_of
from benchmarks.emulator.step.step import LayoutStep
from benchmarks.published_models import build
from benchmarks.published_shape import Shape
from benchmarks.recipes import Recipe
from tests.helpers.recipes import layout_of

A100 = Cluster.get("dgx-a100-80gb")
SHAPE = Shape(6, 256, 8, 8, 32, 1024, gated=False, vocab=16384, seq=128, flash=False)
TABLE = SHAPE.vocab * SHAPE.hidden


@cache
def model(tied: bool, mixed_in: bool = False) -> LayoutModel:
    decoder = build(SHAPE)
    if tied:
        decoder.head.weight = decoder.embedding.weight
    if mixed_in:
        # One matrix that all layers have.
        for layer in decoder.layers[1:]:
            layer.mlp.up.weight = decoder.layers[0].mlp.up.weight
    ids = torch.empty(64, SHAPE.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(decoder, (ids, ids))


def step_of(is_tied: bool, layout: Layout) -> LayoutStep:
    pricing = pricing_of(layout)
    chunks = pricing.chunks(model(is_tied).sections(layout, A100), layout)
    exchanged = sum(section.exchanged_elements for chunk in chunks for section in chunk)
    return pricing.step(chunks, pricing.times(pricing.memory(layout), layout.microbatches(64), A100, exchanged))


@pytest.mark.parametrize("named", [{}, {"zero": 1, "data": 2}, {"cuts": "operations"}, {"interleave": 2}])
def test_the_first_stage_stores_a_tied_embedding_and_lends_it_to_the_last(named: dict[str, object]) -> None:
    """The last has a copy and a gradient of its own, and neither states nor an update. (Two gradients are added in the
    graph, which shifts cuts between operations a little.)"""
    layout = layout_of(pipeline=2, microbatch=4, **named)
    tied, apart = (model(is_tied).price(layout, A100) for is_tied in (True, False))
    shards = layout.data if layout.zero else 1
    for one, other in zip(tied.held, apart.held, strict=True):
        for name in ("weights", "gradients"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=0.01)
    assert tied.held[0].optimizer == pytest.approx(apart.held[0].optimizer, rel=0.01)
    assert apart.held[1].optimizer - tied.held[1].optimizer == pytest.approx(12 * TABLE / shards, rel=0.01)
    latency, bandwidth = message_rate(A100, 0, 1, layout.stage_devices)
    borrowing = 2 * (latency + 4 * TABLE / shards / bandwidth)
    # Read: gradient, master weight and moments. Written: these, and the weight, which is cast from the master weight.
    updating = A100.device.launch_seconds + (4 + 2 * 12 + 4 + 2) * TABLE / shards / A100.device.memory_bandwidth
    longer = step_of(True, layout).update(1) - step_of(False, layout).update(1)
    # Without the table's own gradient buckets are smaller, and updated weights are gathered in more of them.
    assert longer == pytest.approx(borrowing - updating, rel=0.1)


def test_a_rank_that_has_both_ends_holds_a_tied_embedding_once() -> None:
    for layout in (Layout(microbatch=4), Layout(pipeline=2, interleave=2, schedule="zb-v", microbatch=4)):
        tied, apart = (model(is_tied).price(layout, A100) for is_tied in (True, False))
        assert apart.held[0].weights - tied.held[0].weights == 2 * TABLE
        assert apart.held[0].optimizer - tied.held[0].optimizer == 12 * TABLE
        assert tied.parts["update"] <= apart.parts["update"]


@pytest.mark.slow
def test_a_weight_of_all_layers_is_on_every_stage_once() -> None:
    layout = Layout(pipeline=3, microbatch=4)
    shared, apart = (model(False, is_shared).price(layout, A100) for is_shared in (True, False))
    matrix = SHAPE.hidden * SHAPE.ffn
    for one, other in zip(shared.held, apart.held, strict=True):
        assert other.weights - one.weights == 2 * matrix, "two layers on each stage"


def test_a_table_that_two_sections_gather_is_there_once() -> None:
    """Apart, the embedding and the head are the two largest sections. Tied, the largest two are the larger end and a
    layer, and the table's shard rests once."""
    layout = Layout(data=8, zero=3, microbatch=4)
    tied, apart = (model(is_tied).price(layout, A100).held[0] for is_tied in (True, False))
    sections = model(True).sections(layout, A100)
    layer = max(sum(weight.elements for weight in section.weights) for section in sections.layers)
    ends = [sum(weight.elements for weight in end.weights) for end in (sections.before, sections.after)]
    assert min(ends) >= TABLE and layer > sum(ends) - 2 * TABLE
    whole = 2 * (sum(ends) - (max(ends) + layer))
    assert apart.weights - tied.weights == pytest.approx(whole + 2 * TABLE // 8, abs=64)


def test_every_section_that_takes_a_shared_weight_gathers_it() -> None:
    """For forward and for backward of both microbatches; its gradient is scattered once for each, not with the gain and
    the bias before the head."""
    layout = Recipe(data=8, zero=3, microbatch=4, overlap=())
    tied, apart = (model(is_tied).price(layout, A100) for is_tied in (True, False))
    norm = 2 * SHAPE.hidden
    with_table, without = (
        collective_seconds(A100, (8, 1, 1), "reduce_scatter", (0,), 4 * size) for size in (TABLE + norm, norm)
    )
    fewer = apart.predicted.comm_seconds - tied.predicted.comm_seconds
    assert fewer == pytest.approx(2 * (with_table - without), rel=0.01)
