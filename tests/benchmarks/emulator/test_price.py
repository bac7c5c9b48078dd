"""Layouts chosen by hand: what they divide, what they communicate, what they hold and how long they take."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds, total_flops
from autopar.cost.collective.collective import copying_seconds
from autopar.errors import OptionsError
from autopar.ir.assignment import uses
from autopar.layout import Layout
from autopar.planner.step_graphs import step_graph
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced
from benchmarks.emulator.step.memory import FRAGMENTED
from benchmarks.published_models import Decoder, build
from benchmarks.published_shape import Shape
from benchmarks.recipes import Recipe
from tests.helpers.recipes import layout_of

A100 = Cluster.get("dgx-a100-80gb")
SHAPE = Shape(6, 256, 8, 8, 32, 1024, gated=False, vocab=1024, seq=128, flash=False)


def batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.empty(size, SHAPE.seq, dtype=torch.long, device="meta")
    return ids, ids


@cache
def model() -> LayoutModel:
    return LayoutModel.of(build(SHAPE), batch())


def price(**named: object) -> Priced:
    return model().price(layout_of(**named), A100)  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_layer_stands_for_many() -> None:
    """Three kept layers priced for six: the work and the weights of the whole model."""
    deep = build(SHAPE)
    priced = LayoutModel.of(deep, batch(8)).price(Layout(microbatch=8), A100)
    assert len(deep.layers) == SHAPE.layers
    weights = sum(parameter.numel() for parameter in deep.parameters())
    assert priced.predicted.weight_bytes == 2 * weights
    assert priced.predicted.optimizer_bytes == 12 * weights
    ids = batch(8)
    from autopar.planner.prepare import prepare

    whole = prepare(deep, ids, {}, device="cpu", loss_fn=None, training=True)
    products = float(total_flops(step_graph(whole.graph, whole.loss, 8)))
    assert products * 0.95 < priced.flops < products


@cache
def wide() -> LayoutModel:
    """Wide enough that bytes count and not latencies."""
    shape = dataclasses.replace(SHAPE, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384, seq=1024)
    ids = torch.empty(2, shape.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(shape), (ids, ids))


def moved(**named: object) -> list[tuple[str, str]]:
    """(phase, kind) of the collectives of the second layer."""
    placed = wide().placed(layout_of(**named), A100)  # type: ignore[arg-type]
    found = []
    for use in uses(placed.graph, placed.assignment):
        if use.role == "operand" and placed.graph[use.consumer].module.startswith("layers.1"):
            hops = placed.prices.path(use.kind, use.source, use.target)
            found += [(use.phase, hop.collective.kind) for hop in hops if hop.collective is not None]
    return sorted(found)


def test_tensor_parallel_layer_reduces_twice_each_way() -> None:
    assert moved(tensor=4) == [("backward", "all_reduce")] * 2 + [("forward", "all_reduce")] * 2


def test_sequence_parallel_layer_gathers_and_scatters() -> None:
    kinds = moved(tensor=4, sequence_parallel=True)
    assert kinds.count(("forward", "all_gather")) == 2
    assert kinds.count(("forward", "reduce_scatter")) == 2
    assert ("forward", "all_reduce") not in kinds


def test_operands_kept_whole_are_not_gathered_again() -> None:
    again, once = (moved(tensor=4, sequence_parallel=True, operands=kept) for kept in ("shards", "whole"))
    assert once.count(("backward", "all_gather")) == again.count(("backward", "all_gather")) - 2 == 2
    assert [kind for kind in once if kind[0] == "forward"] == [kind for kind in again if kind[0] == "forward"]


def test_products_apart_reduce_each_the_gradient_of_its_input() -> None:
    kinds = moved(tensor=4, separate_dgrad_reductions=("*.query", "*.key", "*.value"))
    assert kinds == [("backward", "all_reduce")] * 4 + [("forward", "all_reduce")] * 2
    assert moved(tensor=4, separate_dgrad_reductions=("*.output",)) == moved(tensor=4)


def test_sequence_parallelism_divides_all_that_is_kept() -> None:
    """Korthikanti et al. 2022, equation 4 and section 4.2.2, without dropout: 32 s b h / t of a layer."""
    shape = wide().prepared.graph.placeholders("input")[0].type.shape
    unit = int(shape[1]) * 4096
    whole, divided = (
        wide().sections(Layout(tensor=4, sequence_parallel=parallel), A100).layers[1] for parallel in (False, True)
    )
    assert whole.saved - whole.saved_inside == pytest.approx((8 + 24 / 4) * unit, rel=0.02)
    assert divided.saved - divided.saved_inside == pytest.approx(32 / 4 * unit, rel=0.02)
    kept = wide().sections(Recipe(tensor=4, sequence_parallel=True, operands="whole"), A100).layers[1]
    assert kept.saved - kept.saved_inside == pytest.approx((4 + 28 / 4) * unit, rel=0.02)


def test_same_flops_however_divided() -> None:
    whole = price(microbatch=4).flops
    assert price(tensor=4, microbatch=4).flops == pytest.approx(whole)
    assert price(pipeline=3, microbatch=4, data=4).flops == pytest.approx(whole)


def test_recomputation_trades_memory_for_time() -> None:
    none, selective, full = (price(microbatch=8, recompute=kind) for kind in ("none", "selective", "full"))
    held = [one.predicted.activation_bytes for one in (none, selective, full)]
    assert held[0] > held[1] > held[2]
    assert none.predicted.step_seconds < selective.predicted.step_seconds < full.predicted.step_seconds
    assert full.flops == none.flops


def test_full_recomputation_keeps_only_the_inputs_of_layers() -> None:
    sections = model().sections(Layout(microbatch=4), A100)
    assert sections.layers[1].entry == 4 * SHAPE.seq * SHAPE.hidden * 2


def test_saved_bytes_are_those_of_the_published_formula() -> None:
    """Korthikanti et al. 2022, without dropout: norms and products keep 2 bytes of what they take, scores 2 a s^2 b."""
    section = model().sections(Layout(microbatch=4), A100).layers[1]
    unit = 4 * SHAPE.seq * SHAPE.hidden
    scores = 2 * SHAPE.heads * SHAPE.seq**2 * 4
    assert section.saved_inside >= scores
    assert section.saved - section.saved_inside == pytest.approx(32 * unit, rel=0.02)


def test_zero_divides_what_rests() -> None:
    stages = [price(data=8, zero=zero).predicted for zero in (0, 1, 2)]
    assert stages[1].optimizer_bytes == pytest.approx(stages[0].optimizer_bytes / 8, rel=0.01)
    assert stages[2].gradient_bytes == pytest.approx(stages[0].gradient_bytes / 8, rel=0.01)
    assert price(data=8, zero=3).predicted.weight_bytes < stages[0].weight_bytes


def test_gradients_of_microbatches_are_added_up() -> None:
    """All but the first of eight: what was computed is read, the sum read and written. Products add up by themselves,
    which computing hides; biases, norms and tables are added by operations of their own."""
    weights, separate = price(microbatch=64).predicted.weight_bytes, {"gradient_accumulation_fusion": False}
    assert price(microbatch=64, **separate).parts["adding up"] == price(microbatch=64).parts["adding up"] == 0.0
    moved = 7 * (weights + 2 * 2 * weights)
    found, fused = price(microbatch=8, **separate), price(microbatch=8)
    assert found.parts["adding up"] == pytest.approx(moved / A100.device.memory_bandwidth)
    assert 0 < fused.parts["adding up"] < 0.3 * found.parts["adding up"]
    longer = found.predicted.step_seconds - fused.predicted.step_seconds
    assert longer == pytest.approx(found.parts["adding up"] - fused.parts["adding up"])
    own = price(microbatch=8, gradients="own", **separate).parts["adding up"]
    assert own == pytest.approx(7 * 3 * weights / A100.device.memory_bandwidth)


def test_what_comes_and_goes_loses_memory_to_fragmentation() -> None:
    found = price(microbatch=8)
    moving = found.predicted.activation_bytes + found.predicted.temporary_bytes
    assert found.reserved - A100.device.reserve_bytes == pytest.approx(FRAGMENTED * moving, rel=1e-6)
    assert found.memory_limit == A100.device.memory_bytes - found.reserved


def test_larger_microbatches_idle_longer_at_the_same_batch() -> None:
    shares = []
    for microbatch in (1, 2, 4):
        found = price(pipeline=3, microbatch=microbatch).predicted
        shares.append(found.bubble_seconds / found.step_seconds)
    assert shares[0] < shares[1] < shares[2]


def test_ends_that_count_as_layers_hold_fewer() -> None:
    """An embedding that counts as one layer and a head that counts as two, in three stages of three: 2, 3 and 1."""
    sections = model().sections(Layout(pipeline=3), A100)
    each = sum(w.elements * w.itemsize for w in sections.layers[1].weights)
    ends = [sum(w.elements * w.itemsize for w in section.weights) for section in (sections.before, sections.after)]
    assert [one.weights for one in price(pipeline=3, embedding_as_layers=1, head_as_layers=2).held] == [
        ends[0] + 2 * each,
        3 * each,
        ends[1] + each,
    ]
    assert [one.weights for one in price(pipeline=3).held] == [ends[0] + 2 * each, 2 * each, ends[1] + 2 * each]
    with pytest.raises(OptionsError, match="a chunk has none"):
        price(pipeline=6, embedding_as_layers=3)


def test_ranks_stand_still_for_messages_over_the_links_between_them() -> None:
    """Two stages of four devices are one node, a third is in the next, whose link is slow; where messages travel while
    ranks compute, none stands still."""
    slow = dataclasses.replace(A100.links[1], bandwidth=1e6, rates={})
    cluster = dataclasses.replace(A100, links=(A100.links[0], slow))
    within, across, overlapped = (
        model().price(Recipe(tensor=4, pipeline=stages, microbatch=8, overlap=overlap), cluster)
        for stages, overlap in ((2, ()), (3, ()), (3, ("message",)))
    )
    assert 0 < within.parts["messages"] < 1e-3 * across.parts["messages"]
    assert overlapped.parts["messages"] == 0.0
    assert across.predicted.step_seconds > across.parts["messages"]
    assert across.predicted.step_seconds > overlapped.predicted.step_seconds > within.predicted.step_seconds


@pytest.mark.parametrize("named", [{"pipeline": 3}, {"pipeline": 2, "interleave": 3}, {"pipeline": 6}])
def test_a_message_for_which_both_ends_stand_still_takes_its_time_once(named: dict[str, int]) -> None:
    """A lone microbatch waits for every message, whether or not something could be computed meanwhile."""
    lone, overlapped = (
        price(microbatch=64, overlap=overlap, **named).predicted.step_seconds for overlap in ((), ("message",))
    )
    assert lone == pytest.approx(overlapped, rel=1e-9)


def test_gradients_are_reduced_as_said() -> None:
    """Scattered, or all of them to every rank, in the dtype they are kept in or in fp32."""
    found = price(data=8, zero=1, gradients="own")
    weights, mesh = found.predicted.weight_bytes, (8, 1, 1)
    for reduction, kind, nbytes in (
        ("scatter", "reduce_scatter", weights),
        ("all", "all_reduce", weights),
        ("all-fp32", "all_reduce", 2 * weights),
    ):
        seconds = price(data=8, zero=1, gradients="own", overlap=(), reduction=reduction).parts["reduce"]
        packing = copying_seconds(A100.device, nbytes)
        assert seconds == pytest.approx(packing + collective_seconds(A100, mesh, kind, (0,), nbytes))
    assert price(data=8, gradients="own", overlap=()).parts["reduce"] == pytest.approx(
        copying_seconds(A100.device, weights) + collective_seconds(A100, mesh, "all_reduce", (0,), weights)
    )


def test_interleaving_shrinks_the_bubble() -> None:
    plain, interleaved = price(pipeline=2, microbatch=8), price(pipeline=2, microbatch=8, interleave=3)
    assert interleaved.predicted.bubble_seconds < plain.predicted.bubble_seconds


@pytest.mark.parametrize(
    "like",
    [
        {},
        {"interleave": 2, "overlap": ()},
        {"interleave": 2, "pipeline": 2},
        {"schedule": "zb-h1"},
        {"schedule": "zb-v", "interleave": 2},
        {"overlap": ()},
    ],
    ids=str,
)
def test_many_microbatches_are_extrapolated_truly(like: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    like = {"pipeline": 3, **like}
    quick = [price_at(size, microbatch=1, **like).predicted.step_seconds for size in (63, 64)]
    for rounds in ("ROUNDS", "LATE_ROUNDS"):
        monkeypatch.setattr(f"benchmarks.emulator.step.step.{rounds}", 100)
    whole = [price_at(size, microbatch=1, **like).predicted.step_seconds for size in (63, 64)]
    assert whole == pytest.approx(quick, rel=2e-3 if "schedule" in like else 5e-4)


@pytest.mark.slow
def test_grouped_and_gated_models_are_priced() -> None:
    shape = dataclasses.replace(SHAPE, kv_heads=2, gated=True, flash=True)
    found = LayoutModel.of(build(shape), batch()).price(Layout(tensor=2, data=2, pipeline=2, zero=1), A100)
    assert found.fits and found.predicted.comm_seconds > 0


def test_a_limit_too_small_says_by_how_much() -> None:
    found = model().price(Layout(), A100, limit=1 << 20)
    assert not found.fits
    assert found.excess_bytes == found.predicted.peak_bytes - (1 << 20)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"tensor": 0}, "tensor=0"),
        ({"recompute": "some"}, "'selective'"),
        ({"zero": 4}, "zero=4"),
        ({"overlap": ("all",)}, "'all'"),
        ({"head_as_layers": -1}, "head_as_layers=-1"),
        ({"reduction": "some"}, "'all-fp32'"),
        ({"overlap": "gradient"}, "overlap='gradient'.: not a tuple"),
        ({"eager": "*norm*"}, "not a tuple"),
        ({"schedule": "dualpipe", "pipeline": 2}, "'dualpipe'.: must be one of 'gpipe'"),
        ({"interleave": 2, "pipeline": 1}, "pipeline=1 has none; take interleave=1, or pipeline=2"),
        ({"schedule": "zb-v", "pipeline": 2}, "'zb-v' runs 2 chunks on each stage; take interleave=2"),
        ({"schedule": "1f1b", "pipeline": 2, "interleave": 2}, "'1f1b' runs 1 chunk on each stage; take interleave=1"),
        ({"zero": 3, "reduction": "all-fp32"}, "take zero=1 or 2"),
    ],
)
def test_bad_layouts_are_refused(named: dict[str, object], said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        layout_of(**named)  # type: ignore[arg-type]


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(OptionsError, match="63 does not divide"):
        price_at(63, data=2)
    with pytest.raises(OptionsError, match="a microbatch of 2 does"):
        price_at(6, microbatch=4, data=3)
    with pytest.raises(OptionsError, match="at most 8"):
        price(pipeline=9)
    with pytest.raises(
        OptionsError, match=r"sequence of 128 \(dim 1\), .* among 3 context ranks; context=2 and context=4 do"
    ):
        price(context=3)
    with pytest.raises(OptionsError, match=r"A100.* has no fp8 products: its peak_flops are of bf16"):
        price(precision="fp8")


def test_heads_divide_among_tensor_ranks() -> None:
    """As Megatron demands; attention spelled out in products is priced with the ranks that have one head more."""
    shape = dataclasses.replace(SHAPE, layers=2, flash=True, heads=6, kv_heads=6)
    flash = LayoutModel.of(build(shape), batch(8))
    with pytest.raises(
        OptionsError, match=r"has 6 heads, which do not divide among 4 tensor ranks; tensor=3 and tensor=6 do"
    ):
        flash.price(Layout(tensor=4, microbatch=8), A100)
    assert flash.price(Layout(tensor=3, microbatch=8), A100).predicted.step_seconds > 0


@pytest.mark.slow
def test_two_layers_are_stages_too() -> None:
    """A list of layers too short to be shortened, and one of unlike layers."""
    short = LayoutModel.of(build(dataclasses.replace(SHAPE, layers=2)), batch())
    assert short.price(Layout(pipeline=2), A100).predicted.bubble_seconds > 0
    with pytest.raises(OptionsError, match="cuts 2 layers into 5 chunks; at most 4"):
        short.price(Layout(pipeline=5), A100)


def price_at(size: int, **named: object) -> Priced:
    return model().price(layout_of(**named), A100, size)  # type: ignore[arg-type]


def test_the_decoder_is_a_model_like_any() -> None:
    small = dataclasses.replace(SHAPE, layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=32, seq=8)
    decoder = Decoder(small)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.02)
    ids = torch.randint(0, 32, (2, 8))
    assert decoder(ids, ids).isfinite()


def test_updates_are_computing_and_gathers_are_not() -> None:
    """One device sends no messages; what it updates takes time all the same."""
    alone = price(microbatch=8).predicted
    assert alone.comm_seconds == pytest.approx(0, abs=1e-12)
    assert price(microbatch=8).parts["update"] > 0
    assert price(data=4, microbatch=8, zero=1, overlap=()).predicted.comm_seconds > 0
    assert alone.compute_seconds == pytest.approx(alone.step_seconds)


def test_offloaded_states_travel_and_need_a_host() -> None:
    """Each weight's states come from the host and go back, hidden by nothing; a host without room is told in bytes."""
    weights = [w for section in model().sections(Layout(microbatch=8), A100).every for w in section.weights]
    elements = sum(weight.elements for weight in weights)
    for zero, share in ((0, 1), (1, 4)):
        there, away = (price(data=4, microbatch=8, zero=zero, offload=offload) for offload in (False, True))
        nbytes = 12 * elements // share
        seconds = 2 * (len(weights) * A100.device.launch_seconds + nbytes / A100.device.host_bandwidth)
        assert away.parts["offload"] == pytest.approx(seconds)
        assert away.predicted.step_seconds - there.predicted.step_seconds == pytest.approx(seconds)
        assert away.predicted.comm_seconds - there.predicted.comm_seconds == pytest.approx(seconds)
        assert (there.held[0].optimizer, there.held[0].offloaded) == (nbytes, 0)
        assert (away.held[0].optimizer, away.held[0].offloaded) == (0, nbytes)
    for gigabytes, message in ((0, "no host memory to offload to"), (1e-3, "of which 800000 bytes may be used")):
        host = {"host_bandwidth": gigabytes * 1e9, "host_memory_bytes": int(gigabytes * 1e9)}
        device = dataclasses.replace(A100.device, **host)
        with pytest.raises(OptionsError, match=message):
            model().price(Layout(offload=True), dataclasses.replace(A100, device=device))


def test_weights_that_nobody_shares_are_not_gathered() -> None:
    assert price(zero=3, microbatch=8).predicted == price(microbatch=8).predicted
