"""The search over layouts: its answer, what it is compared with, and what is said where nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost.memory import usable_host_bytes
from autopar.errors import InfeasibleError, OptionsError
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import quick_price
from benchmarks.emulator.search import LayoutSearchResult, best_layout, rule_of_thumb
from benchmarks.emulator.space import PLANNED, Space, candidates
from benchmarks.emulator.trials import LayoutSearch
from benchmarks.published_models import build
from benchmarks.published_shape import Shape
from benchmarks.recipes import Recipe

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


@cache
def best() -> LayoutSearchResult:
    return best_layout(model(), A100, DEVICES, batch=BATCH)


@pytest.mark.slow
def test_best_is_at_least_as_good_as_the_rule_of_thumb() -> None:
    found = best()
    assert found.best.fits and found.rule is not None
    assert found.best.predicted.step_seconds <= found.rule.predicted.step_seconds
    assert found.gap <= 0.01


def test_no_candidate_is_priced_below_the_best() -> None:
    least = best().best.predicted.step_seconds
    for layout in list(candidates(DEVICES, BATCH, SHAPE.layers, 8))[::17]:
        priced = model().price(layout, A100)
        quick = quick_price(model().sections(layout, A100), layout, BATCH, A100)
        assert quick.peak == priced.predicted.peak_bytes
        assert priced.predicted.step_seconds >= least * (1 - 1e-9) or not priced.fits


def test_where_nothing_fits_what_is_advised_does() -> None:
    """Whoever follows the advice finds a layout of so many bytes, in the space that was asked for."""
    limit, space, devices = 40 << 20, Space(tensor=(1, 2), zero=(1,), recompute=("full",)), 4
    with pytest.raises(InfeasibleError) as caught:
        best_layout(model(), A100, devices, batch=BATCH, limit=limit, space=space)
    said = str(caught.value)
    assert f"({limit} bytes)" in said
    advised = re.findall(
        r"With (\d+) devices( and optimizer states offloaded[^:]*)?: .*? \((\d+) bytes\) as (.*?), which fits", said
    )
    assert {offloaded != "" for _, offloaded, _, _ in advised} == {True, False}
    for more, offloaded, nbytes, layout in advised:
        like = Layout(offload=offloaded != "")
        best = best_layout(model(), A100, int(more), batch=BATCH, limit=limit, like=like, space=space).best
        assert (str(best.layout), best.predicted.peak_bytes) == (layout, int(nbytes)) and best.fits
        if int(more) > devices:
            with pytest.raises(InfeasibleError):
                best_layout(model(), A100, int(more) // 2, batch=BATCH, limit=limit, like=like, space=space)


def test_what_is_fixed_is_advised_to_be_left_out() -> None:
    free = best_layout(model(), A100, DEVICES, batch=BATCH, space=Space(recompute=("full",)))
    limit = min(priced.predicted.peak_bytes for priced in free.ranked)
    fixed = Space(recompute=("none",), zero=(0,), tensor=(1,))
    with pytest.raises(InfeasibleError, match=r"With tensor and recompute and zero left out: .* which fits"):
        best_layout(model(), A100, DEVICES, batch=BATCH, limit=limit, space=fixed)


def test_recomputations_that_are_the_same_are_tried_once() -> None:
    """Attention in one kernel keeps nothing of its inside: found as well where nothing else is asked for."""
    one = Space(tensor=(1,), pipeline=(1,), microbatch=(1,))
    tried = {
        asked: {
            quick.layout.recompute for quick in LayoutSearch(model(), A100, BATCH, like=Recipe(), space=space).tried(4)
        }
        for asked in ((), ("none", "selective"), ("selective",), ("elementwise",))
        for space in [replace(one, recompute=asked)]
    }
    assert tried[()] == {"none", "elementwise", "full"} and tried["none", "selective"] == {"none"}
    assert tried["selective",] == {"selective"} and tried["elementwise",] == {"elementwise"}


def test_embedding_and_head_may_be_chunks_of_their_own() -> None:
    found = [layout for layout in candidates(5, 40, SHAPE.layers, 8) if layout.chunks == SHAPE.layers + 2]
    assert found and max(layout.chunks for layout in candidates(5, 40, SHAPE.layers, 8)) == SHAPE.layers + 2
    assert model().price(found[0], A100, 40).predicted.step_seconds > 0


def test_values_that_do_not_go_with_what_is_given_are_left_out() -> None:
    """ZeRO-3 with all-reduced gradients; chunks with a schedule that has none. Refused where nothing else is tried."""
    for like, name in ((Recipe(reduction="all"), "zero"), (Layout(schedule="1f1b"), "interleave")):
        tried, free = (list(candidates(DEVICES, BATCH, 8, 8, like=one, space=PLANNED)) for one in (like, Layout()))
        left = {getattr(one, name) for one in free} - {getattr(one, name) for one in tried}
        assert tried and 3 in left
    with pytest.raises(OptionsError, match=r"Recipe\(zero=3, reduction='all'\)"):
        list(candidates(4, BATCH, 8, 8, like=Recipe(reduction="all"), space=Space(tensor=(1,), data=(4,), zero=(3,))))


def test_states_that_one_rank_has_no_room_for_are_passed_over() -> None:
    """Of nine places in four stages the second has three: more than the others, which bounds look at."""
    like, space = (
        Recipe(offload=True, embedding_as_layers=1),
        Space(tensor=(1,), pipeline=(4,), interleave=(1,), recompute=("full",)),
    )
    held = model().price(replace(like, pipeline=4, recompute="full"), A100).held
    assert held[1].offloaded > max(held[rank].offloaded for rank in (0, 2, 3))
    room = (held[1].offloaded + max(held[rank].offloaded for rank in (0, 2, 3))) // 2
    full = A100.device.host_memory_bytes
    share = full / usable_host_bytes(A100)
    tight = replace(A100, device=replace(A100.device, host_memory_bytes=int(room * share)))
    search = LayoutSearch(model(), tight, BATCH, like=like, space=space)
    tried = search.tried(4)
    assert tried and search.quickest(tried) == []


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
    free = rule_of_thumb(LayoutSearch(model(), A100, BATCH), DEVICES)
    assert free is not None and (free.layout.tensor, free.layout.pipeline) == (8, 1)
    tight = rule_of_thumb(LayoutSearch(model(), A100, BATCH, free.predicted.peak_bytes - 1), DEVICES)
    assert tight is not None and tight.layout.pipeline == 2
