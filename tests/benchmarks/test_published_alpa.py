"""What Alpa's repository says of its published rows: layouts of its scripts, embeddings, where stages are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published import price_row
from benchmarks.published_rows import case_of
from tests.helpers.published_row import MODELS, change, made_up

ROW = made_up(
    cluster={"gpu": "V100-16GB", "n_gpus": 4, "gpus_per_node": 8, "inter": "25 Gb/s Ethernet per node"},
    parallel={"global_batch": 1024, "recompute": "full", "precision": "fp16"},
)


def row_of(family: str, method: str, devices: int, **model: object) -> dict[str, Any]:
    row = change(change(ROW, "parallel", method=method), "cluster", n_gpus=devices)
    return {**change(row, "model", **model), "source": "Alpa OSDI 2022", "row": f"{family} {method} n={devices}"}


@pytest.mark.parametrize(
    ("method", "devices", "text"),
    [
        ("alpa.intra_only", 2, "data=2 microbatch=8 recompute=full zero=2 cuts=operations"),
        ("alpa.intra_only", 64, "tensor=32 data=2 microbatch=1 recompute=full zero=2 cuts=operations"),
        (
            "megatron",
            16,
            "tensor=2 pipeline=8 microbatch=4 recompute=full overlap=weight+message gradient_accumulation_fusion=False",
        ),
    ],
)
def test_layouts_that_scripts_give_are_not_chosen(method: str, devices: int, text: str) -> None:
    case = case_of(row_of("gpt", method, devices))
    assert case.space is None and set(text.split()) <= set(str(case.layout).split())
    assert case.devices == devices


def test_of_mixtures_scripts_give_how_many_microbatches() -> None:
    intra, stages, plain = (
        case_of(row_of("moe", method, devices, experts_every_other_layer=8, top_k=2))
        for method, devices in (("alpa.intra_only", 4), ("alpa.auto", 16), ("alpa.auto", 64))
    )
    assert intra.space and intra.space.microbatches == (16,) and intra.space.expert is not None
    assert stages.space and (stages.space.pipeline, stages.space.data, stages.space.tensor) == ((2,), (8,), (1,))
    assert plain.space and not plain.space.microbatches


def test_what_a_row_says_itself_stays() -> None:
    row = change(row_of("gpt", "megatron", 4), "parallel", microbatch=1)
    assert case_of(row).layout.microbatch == 1


def test_stages_of_one_device_hold_as_many_layers_where_layers_divide() -> None:
    even, odd, searched = (
        case_of(row_of("gpt", method, devices))
        for method, devices in (("alpa.inter_only", 4), ("alpa.inter_only", 8), ("alpa.auto", 4))
    )
    assert (even.layout.cuts, odd.layout.cuts, searched.layout.cuts) == ("layers", "operations", "operations")


@pytest.mark.slow
def test_embeddings_by_one_hot_products_are_priced() -> None:
    """Forward and for the gradient of each table: 2 x 2 FLOPs for each token and element of the tables."""
    row = row_of("gpt", "alpa.intra_only", 1)
    case = case_of(row)
    looked_up = case_of(change(row, "model", one_hot_embedding=False))
    assert case.shape.one_hot and not looked_up.shape.one_hot and case.sweep == looked_up.sweep
    by_products, by_lookup = (price_row(one, MODELS)[0] for one in (case, looked_up))
    tokens, rows = 1024 * 128, 1024 + 128
    assert by_products.flops - by_lookup.flops == pytest.approx(4 * tokens * rows * 256, rel=1e-6)
    assert by_products.predicted.step_seconds > by_lookup.predicted.step_seconds


@pytest.mark.slow
def test_masks_take_passes_by_their_dtype_and_by_what_is_fused() -> None:
    """Two masks of [tokens, experts, slots] forward; in fp32, operation by operation, several times as long."""
    row = change(row_of("moe", "alpa.intra_only", 1, experts={"n": 8, "top_k": 2}, ffn=512), "parallel", p=1, t=1)
    row = change(change(row, "parallel", microbatch=8), "model", expert_group_size=1024)
    fused, wide = (case_of(change(row, "model", wide_masks=wide)) for wide in (False, True))
    assert fused.sweep == wide.sweep and fused.shape != wide.shape
    narrow, alone = (replace(fused.layout, eager=eager) for eager in ((), ("*slots",)))
    cluster, model, wider = fused.cluster, MODELS.of(fused), MODELS.of(wide)
    forwards = [
        one.price(layout, cluster, 1024).parts["forward"]
        for one, layout in ((model, narrow), (model, alone), (wider, alone))
    ]
    assert forwards == sorted(forwards)
    mask = 1024 * 128 * 2 * 1024 * 2 / cluster.device.memory_bandwidth
    assert forwards[1] - forwards[0] > 4 * 4 * mask and forwards[2] - forwards[1] > 4 * 4 * mask


def test_deepspeed_reduces_the_gradients_of_every_microbatch_under_its_backward() -> None:
    layout = case_of(row_of("moe", "deepspeed", 4, experts_every_other_layer=8, top_k=2)).layout
    assert (layout.reducing, layout.zero, layout.expert, layout.microbatch) == ("microbatch", 2, 4, 8)
    assert "gradient" in layout.overlap
