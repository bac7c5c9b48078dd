"""The search over layouts: its answer, what it is compared with, and what is said where nothing fits."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.layout import Layout
from autopar.layout_model import LayoutModel
from autopar.layout_price import quick_price
from autopar.layout_search import Space, best_layout, candidates, rule_of_thumb
from benchmarks.published_models import build
from benchmarks.published_shape import Shape

A100 = Cluster.get("dgx-a100-80gb")
SHAPE = Shape(8, 512, 8, 8, 64, 2048, gated=False, vocab=2048, seq=256, flash=True)
BATCH, DEVICES = 32, 16


@cache
def model() -> LayoutModel:
    ids = torch.empty(BATCH, SHAPE.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(SHAPE), (ids, ids))


def test_candidates_use_every_device_and_divide_the_batch() -> None:
    found = list(candidates(DEVICES, BATCH, SHAPE.layers, 8))
    assert found and all(layout.devices == DEVICES for layout in found)
    assert all(layout.microbatches(BATCH) >= 1 for layout in found)
    assert len(set(found)) == len(found)


def test_best_is_at_least_as_good_as_the_rule_of_thumb() -> None:
    found = best_layout(model(), A100, DEVICES, batch=BATCH)
    assert found.best.fits and found.rule is not None
    assert found.best.predicted.step_seconds <= found.rule.predicted.step_seconds
    assert found.gap <= 0.01


def test_no_candidate_is_priced_below_the_best() -> None:
    best = best_layout(model(), A100, DEVICES, batch=BATCH).best.predicted.step_seconds
    for layout in list(candidates(DEVICES, BATCH, SHAPE.layers, 8))[::17]:
        priced = model().price(layout, A100)
        quick = quick_price(model().sections(layout, A100), layout, BATCH, A100)
        assert quick.peak == priced.predicted.peak_bytes
        assert priced.predicted.step_seconds >= best * (1 - 1e-9) or not priced.fits


def test_where_nothing_fits_what_is_advised_does() -> None:
    """Whoever follows the advice finds a layout of so many bytes."""
    limit = 24 << 20
    with pytest.raises(InfeasibleError) as caught:
        best_layout(model(), A100, DEVICES, batch=BATCH, limit=limit)
    said = str(caught.value)
    assert f"({limit} bytes)" in said
    advised = re.findall(
        r"With (\d+) devices( and optimizer states offloaded[^:]*)?: .*? \((\d+) bytes\) as (.*?), which fits", said
    )
    assert {offloaded != "" for _, offloaded, _, _ in advised} == {True, False}
    for devices, offloaded, nbytes, layout in advised:
        like = Layout(offload=offloaded != "")
        best = best_layout(model(), A100, int(devices), batch=BATCH, limit=limit, like=like).best
        assert (str(best.layout), best.predicted.peak_bytes) == (layout, int(nbytes)) and best.fits
        if int(devices) > DEVICES:
            with pytest.raises(InfeasibleError):
                best_layout(model(), A100, int(devices) // 2, batch=BATCH, limit=limit, like=like)


def test_what_is_fixed_is_advised_to_be_left_out() -> None:
    free = best_layout(model(), A100, DEVICES, batch=BATCH, space=Space(recompute=("full",)))
    limit = min(priced.predicted.peak_bytes for priced in free.ranked)
    with pytest.raises(InfeasibleError, match=r"With zero and recompute left out: .* which fits"):
        best_layout(
            model(), A100, DEVICES, batch=BATCH, limit=limit, space=Space(recompute=("none",), zero=(0,), tensor=(1,))
        )


def test_weights_are_divided_and_microbatches_grow_where_that_pays() -> None:
    """The best is no slower than what was not searched before: ZeRO-3, and microbatches beyond the usual ones."""
    best = best_layout(model(), A100, 2, batch=64).best
    assert best.layout.microbatch > 4
    for zero, microbatch in ((1, 4), (3, 4), (3, 8), (3, best.layout.microbatch)):
        layout = Layout(data=2, microbatch=microbatch, zero=zero)  # type: ignore[arg-type]
        assert best.predicted.step_seconds <= model().price(layout, A100, 64).predicted.step_seconds * (1 + 1e-9)


def test_a_model_without_a_list_of_layers() -> None:
    whole = torch.nn.Bilinear(16, 16, 8)
    traced = LayoutModel.of(whole, (torch.zeros(8, 16), torch.zeros(8, 16)), lambda out: out.sum())
    assert best_layout(traced, A100, 4, batch=8).best.layout.devices == 4


def test_the_rule_takes_as_few_stages_as_fit() -> None:
    free = rule_of_thumb(model(), A100, DEVICES, batch=BATCH)
    assert free is not None and (free.layout.tensor, free.layout.pipeline) == (8, 1)
    tight = rule_of_thumb(model(), A100, DEVICES, batch=BATCH, limit=free.predicted.peak_bytes - 1)
    assert tight is not None and tight.layout.pipeline == 2
