"""Chunks cut between any operations, fewer moments, states in host memory, buffers laid out beforehand, gradients
reduced microbatch by microbatch."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.pricing import pricing_of
from benchmarks.emulator.sections.section import Section
from benchmarks.published_models import build
from benchmarks.published_shape import Shape
from benchmarks.recipes import Recipe
from benchmarks.recipes.section import of_recipe
from benchmarks.recipes.times import host_again, recomputed

A100 = Cluster.get("dgx-a100-80gb")
# A head that takes as long as several layers.
SHAPE = Shape(6, 256, 8, 8, 32, 1024, gated=False, vocab=16384, seq=128, flash=False)


@cache
def model() -> LayoutModel:
    ids = torch.empty(64, SHAPE.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(SHAPE), (ids, ids))


def chunks(layout: Recipe) -> list[list[Section]]:
    return list(map(list, pricing_of(layout).chunks(model().sections(layout, A100), layout)))


def work(chunk: list[Section], layout: Recipe) -> float:
    return sum((one.forward + one.backward + recomputed(one, layout)).total for one in chunk)


@pytest.mark.parametrize("count", [2, 3, 4, 16])
def test_chunks_between_operations_take_equally_long_and_lose_nothing(count: int) -> None:
    layout = Recipe(pipeline=count, recompute="full", cuts="operations")
    every = model().sections(layout, A100).every
    found = chunks(layout)
    times = [work(chunk, layout) for chunk in found]
    assert len(found) == count and times == pytest.approx([sum(times) / count] * count)
    parts = [section for chunk in found for section in chunk]
    for name in ("flops", "saved"):
        whole = sum(getattr(one, name) for one in every)
        assert sum(getattr(one, name) for one in parts) == pytest.approx(whole, abs=len(parts))
    elements, whole = (sum(w.elements for one in of for w in one.weights) for of in (parts, every))
    assert elements == pytest.approx(whole, abs=20 * len(parts))


def test_steps_cut_between_operations_are_quicker_where_layers_are_few() -> None:
    between, within = (
        model().price(Recipe(pipeline=4, recompute="full", cuts=cuts), A100) for cuts in ("layers", "operations")
    )
    assert within.predicted.step_seconds < 0.9 * between.predicted.step_seconds
    assert within.flops == pytest.approx(between.flops)
    assert model().price(Recipe(pipeline=16, cuts="operations"), A100).predicted.step_seconds > 0


@pytest.mark.parametrize("recompute", ["none", "selective", "elementwise", "operations", "full"])
def test_what_is_computed_again_waits_for_its_share_of_the_host(recompute: Any) -> None:
    device = dataclasses.replace(A100.device, host_seconds=1e-3)
    layout = Recipe(recompute=recompute, cuda_graphs=())
    section = model().sections(layout, dataclasses.replace(A100, device=device)).layers[0]
    again, whole = recomputed(section, layout), section.forward
    waited, of_forward = host_again(section, layout), of_recipe(section).hosts[0]
    assert of_forward > 0
    assert waited / of_forward == pytest.approx(again.compute / whole.compute)
    assert (waited > 0) == (recompute != "none") and (waited < of_forward) == (recompute != "full")


def test_moments_count_in_bytes_of_states() -> None:
    adam, adafactor = (model().price(Recipe(moments=count), A100).predicted for count in (2, 0))
    assert adam.optimizer_bytes == 3 * adafactor.optimizer_bytes > 0
    with pytest.raises(OptionsError, match="moments=-1"):
        Recipe(moments=-1)
    with pytest.raises(OptionsError, match="cuts='rows'"):
        Recipe(cuts="rows")  # type: ignore[arg-type]


def test_buffers_laid_out_beforehand_lose_nothing() -> None:
    caching, static = (model().price(Recipe(microbatch=4, allocation=kind), A100) for kind in ("caching", "static"))
    assert caching.predicted.peak_bytes == static.predicted.peak_bytes
    assert static.reserved == A100.device.reserve_bytes < caching.reserved


def test_gradients_reduced_with_every_microbatch_are_waited_for_as_often() -> None:
    once, each = (
        model().price(Recipe(data=4, zero=2, microbatch=4, overlap=(), reducing=reducing), A100)
        for reducing in ("step", "microbatch")
    )
    more = 3 * once.parts["reduce"]
    assert each.parts["reduce"] == pytest.approx(4 * once.parts["reduce"]) and more > 0
    assert each.predicted.step_seconds - once.predicted.step_seconds == pytest.approx(more)
    assert each.predicted.comm_seconds - once.predicted.comm_seconds == pytest.approx(more)


def test_reductions_of_every_microbatch_hold_up_each_stage_and_hide_under_backward() -> None:
    def seconds(overlap: tuple[str, ...], reducing: str) -> float:
        layout = Recipe(data=2, pipeline=2, zero=2, microbatch=4, overlap=overlap, reducing=reducing)
        return model().price(layout, A100).predicted.step_seconds

    assert seconds((), "microbatch") > seconds(("gradient",), "microbatch") >= seconds(("gradient",), "step")
