"""How weights, gradients and optimizer states rest, and what allocators lose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.cost.collective.collective import copying_seconds
from autopar.errors import OptionsError
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced
from benchmarks.published_models import build
from benchmarks.published_shape import Experts, Shape
from benchmarks.recipes import Recipe
from tests.helpers.recipes import layout_of

H100 = Cluster.get("dgx-h100")
SHAPE = Shape(2, 256, 4, 4, 64, 512, gated=True, vocab=1024, seq=128, flash=True)
MIXTURE = Shape(2, 256, 4, 4, 64, 512, gated=True, vocab=1024, seq=128, flash=True, experts=Experts(8, 2, 128))
# Of a layer: query, key, value, output; gate, up, down.
MATRICES = 2 * (4 * 256 * 256 + 3 * 256 * 512)
REST = 2 * 1024 * 256 + (2 * 2 + 1) * 256


@cache
def model(shape: Shape = SHAPE) -> LayoutModel:
    ids = torch.empty(16, shape.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(shape), (ids, ids))


def price(shape: Shape = SHAPE, **named: Any) -> Priced:
    return model(shape).price(layout_of(**named), H100)


def test_weights_of_products_in_fp8_have_copies_or_rest_in_fp8() -> None:
    """In rows and in columns; all that products in fp8 do not take is in bf16."""
    layouts: list[dict[str, Any]] = [{}, {"precision": "fp8"}, {"precision": "fp8", "weights": "fp8"}]
    bf16, own, fp8 = (price(**named).predicted.weight_bytes for named in layouts)
    assert bf16 == fp8 == 2 * (MATRICES + REST)
    assert own == bf16 + 2 * MATRICES


def test_shards_in_fp8_are_rows_alone_and_travel_as_these() -> None:
    """A byte less of each element of the share, and two less of both layers as they are gathered."""
    named: dict[str, Any] = {"data": 8, "zero": 3, "precision": "fp8", "overlap": ()}
    own, fp8 = (price(**named, weights=weights) for weights in ("own", "fp8"))
    assert own.predicted.weight_bytes - fp8.predicted.weight_bytes == MATRICES // 8 + 2 * MATRICES
    assert fp8.predicted.comm_seconds < own.predicted.comm_seconds


def test_weights_in_fp8_are_gathered_so_once_they_are_updated() -> None:
    """A byte of each element of the matrices in layers, and two of all others."""
    for zero in (1, 2):
        named: dict[str, Any] = {"data": 8, "zero": zero, "precision": "fp8"}
        own, fp8 = (price(**named, weights=weights).parts["update"] for weights in ("own", "fp8"))
        sizes = (2 * (MATRICES + REST), MATRICES + 2 * REST)
        wide, narrow = (collective_seconds(H100, (8, 1, 1), "all_gather", (0,), size) for size in sizes)
        packing = copying_seconds(H100.device, sizes[0] - sizes[1])
        # Of a bucket each weight takes all others to be of its own dtype.
        assert own - fp8 == pytest.approx(packing + wide - narrow, rel=0.03)


def test_matrices_of_experts_are_cast_too() -> None:
    """Not routers; each has eight experts of two matrices, the first twice as wide."""
    own, fp8 = (price(MIXTURE, precision="fp8", weights=weights).predicted.weight_bytes for weights in ("own", "fp8"))
    assert own - fp8 == 2 * 2 * (4 * 256 * 256 + 8 * 3 * 256 * 128)


def test_rows_of_experts_are_kept_in_fp8() -> None:
    """Rows that came are taken again by a product alone; what the activation takes stays in bf16."""
    kept = {
        precision: model(MIXTURE).sections(layout_of(precision=precision), H100).layers[0].saved
        for precision in ("bf16", "fp8")
    }
    without = {
        precision: kept[precision] - 2 * 128 * (256 * each + 2 * 128 * 2)
        for precision, each in (("bf16", 2), ("fp8", 1))
    }
    # Two norms' results; the first is read by the products of attention, the second by the router as well.
    assert without["bf16"] - without["fp8"] == 128 * 256


def test_bytes_of_states() -> None:
    """An element has a master weight and two moments; the remainder of one in bf16 is two bytes."""
    elements = MATRICES + REST
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 12),
        ({"states": "bf16"}, 8),
        ({"masters": "remainder"}, 10),
        ({"states": "bf16", "moments": 1}, 6),
        ({"states": "bf16", "masters": "remainder"}, 6),
        ({"precision": "fp32"}, 8),
        ({"precision": "fp8", "weights": "fp8", "states": "bf16"}, 8),
    ]
    for named, each in cases:
        found = price(**named)
        assert found.predicted.optimizer_bytes == each * elements, named
    assert price(states="bf16").parts["update"] < price().parts["update"]


def test_a_master_is_made_of_the_weight_and_its_remainder() -> None:
    """Moments and remainders, 10 bytes, are read and written, so is the weight, and a gradient in fp32 is read."""
    seconds = price(masters="remainder").parts["update"]
    assert seconds * H100.device.memory_bandwidth == pytest.approx((2 * 10 + 2 * 2 + 4) * (MATRICES + REST))


def test_expandable_segments_lose_nothing() -> None:
    caching, expandable = (price(allocation=kind) for kind in ("caching", "expandable"))
    assert caching.held[0].lost > 0 == expandable.held[0].lost
    assert expandable.memory_limit == H100.device.memory_bytes - H100.device.reserve_bytes


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"weights": "fp8"}, r'Recipe\(weights="fp8", precision=\'bf16\'\).*take precision="fp8"'),
        (
            {"masters": "remainder", "precision": "fp16"},
            r"precision='fp16'\): a remainder is what weights in bf16 lack",
        ),
        ({"masters": "remainder", "precision": "fp8", "weights": "fp8"}, 'weights="fp8".: a remainder'),
        ({"states": "fp16"}, "states='fp16'.: must be one of 'fp32', 'bf16'"),
        ({"allocation": "pools"}, "'caching', 'expandable', 'static'"),
    ],
)
def test_what_cannot_rest_so_is_refused(named: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Recipe(**named)  # type: ignore[arg-type]


def test_layouts_are_read_as_they_are_written() -> None:
    layout = Recipe(precision="fp8", weights="fp8", states="bf16", allocation="expandable")
    assert Recipe.parse(str(layout)) == layout


@pytest.mark.slow
def test_what_layers_keep_rests_on_the_host() -> None:
    """But for two layers that travel or are at work; a slow host is waited for, a quick one hides the way."""
    deep = replace(SHAPE, layers=6)
    there, away = (price(deep, microbatch=16, offload_layers=count) for count in (0, 5))
    layer = model(deep).sections(Layout(microbatch=16), H100).layers[0].saved
    assert there.predicted.activation_bytes - away.predicted.activation_bytes == (5 - 2) * layer
    assert away.held[0].offloaded == 5 * layer
    slow = replace(H100, device=replace(H100.device, host_bandwidth=1e6))
    waited = model(deep).price(Recipe(microbatch=16, offload_layers=5), slow)
    assert waited.predicted.step_seconds == pytest.approx(2 * 5 * layer / 1e6, rel=0.01)
    assert waited.parts["offload"] == pytest.approx(waited.predicted.step_seconds, rel=0.01)
    quick = replace(H100, device=replace(H100.device, host_bandwidth=1e15))
    hidden = model(deep).price(Recipe(microbatch=16, offload_layers=5), quick)
    assert hidden.predicted.step_seconds == there.predicted.step_seconds
    assert hidden.parts["offload"] == 0.0


def test_layers_that_cannot_rest_on_the_host_are_refused() -> None:
    with pytest.raises(OptionsError, match=r"offload_layers=3\): the model has 2 layers; take 2"):
        price(offload_layers=3)
    with pytest.raises(OptionsError, match=r"offload_layers=1, pipeline=2, .*take offload_layers=0, or pipeline=1"):
        Recipe(offload_layers=1, pipeline=2)
    with pytest.raises(
        OptionsError, match=r"schedule='gpipe'\).*GPipe retains those of several; .*, or another schedule"
    ):
        Recipe(offload_layers=1, schedule="gpipe")
    for memory, said in (
        (0, "or leave offload_layers out"),
        (1000, "what rests on the host, .* bytes, does not fit .* or offload less"),
    ):
        device = replace(H100.device, host_bandwidth=1e9 * bool(memory), host_memory_bytes=memory)
        with pytest.raises(OptionsError, match=said):
            model().price(Recipe(offload_layers=2), replace(H100, device=device))
