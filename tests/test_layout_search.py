"""The search over layouts: its answer, what it is compared with, and what is said where nothing fits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.layout_model import LayoutModel
from autopar.layout_price import quick_price
from autopar.layout_search import best_layout, candidates, rule_of_thumb
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


def test_where_nothing_fits_what_would_is_said_in_bytes() -> None:
    limit = 24 << 20
    with pytest.raises(InfeasibleError) as caught:
        best_layout(model(), A100, DEVICES, batch=BATCH, limit=limit)
    said = str(caught.value)
    assert f"({limit} bytes)" in said and "offloaded" in said and "128 devices" in said
    assert "which fits" in said


def test_the_rule_takes_as_few_stages_as_fit() -> None:
    free = rule_of_thumb(model(), A100, DEVICES, batch=BATCH)
    assert free is not None and (free.layout.tensor, free.layout.pipeline) == (8, 1)
    tight = rule_of_thumb(model(), A100, DEVICES, batch=BATCH, limit=free.predicted.peak_bytes - 1)
    assert tight is not None and tight.layout.pipeline == 2
