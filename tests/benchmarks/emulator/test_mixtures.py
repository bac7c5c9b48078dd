"""What mixtures of experts cost beyond products: rows that travel once, casts, accumulated gradients, a slow host."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.cost.overlap import TAKEN
from autopar.errors import OptionsError
from autopar.layout import Layout
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.sections.expert_all_to_all import Block
from benchmarks.emulator.sections.experts import BETWEEN, BlockPrices
from benchmarks.published_models import build
from benchmarks.published_shape import Experts, Shape
from benchmarks.recipes import Recipe
from benchmarks.recipes.dispatch import dispatch_seconds, sent_rows
from benchmarks.recipes.experts import ARRANGING, RecipeBlocks
from benchmarks.recipes.section import of_recipe
from tests.helpers.recipes import block_cost, layout_of

H100 = Cluster.get("dgx-h100")
SHAPE = Shape(3, 512, 8, 8, 64, 2048, gated=True, vocab=1024, seq=256, flash=True, experts=Experts(16, 2, 512))


def with_device(**named: float) -> Cluster:
    return dataclasses.replace(H100, device=dataclasses.replace(H100.device, **named))


def with_host(seconds: float) -> Cluster:
    return with_device(host_seconds=seconds)


@cache
def model(shape: Shape = SHAPE) -> LayoutModel:
    ids = torch.empty(64, shape.seq, dtype=torch.long, device="meta")
    return LayoutModel.of(build(shape), (ids, ids))


def block(**named: float) -> Block:
    """Of 16 experts every token chooses 4."""
    return dataclasses.replace(Block(4000.0, 16, 16, 1024, 2048, 1024, 2, 1000, 4), **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_token_travels_once_to_each_rank_that_has_experts_it_chose(ranks: int) -> None:
    layout = Recipe(data=16, expert=ranks, dispatch="tokens")
    sets = list(itertools.combinations(range(16), 4))
    spread = sum(len({expert * ranks // 16 for expert in chosen}) for chosen in sets) / len(sets)
    assert sent_rows(block(), layout) == pytest.approx(1000 * spread)
    assert sent_rows(block(), dataclasses.replace(layout, dispatch="rows")) == 4000


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(("groups", "chosen"), [(4, 1), (4, 2), (8, 4), (2, 2)])
def test_experts_of_few_groups_are_on_fewer_ranks(ranks: int, groups: int, chosen: int) -> None:
    """All sets of groups are equally likely, and in them all sets of experts."""
    each, choices = 16 // groups, 2
    sets = [
        {expert * ranks // 16 for expert in experts}
        for picked in itertools.combinations(range(groups), chosen)
        for experts in itertools.combinations([g * each + i for g in picked for i in range(each)], choices)
    ]
    recipe = Recipe(data=16, expert=ranks, dispatch="tokens", expert_groups=groups, chosen_groups=chosen)
    sent = sent_rows(block(chosen=choices, rows=2000.0), recipe)
    assert sent == pytest.approx(1000 * sum(map(len, sets)) / len(sets))
    assert sent <= sent_rows(
        block(chosen=choices, rows=2000.0), dataclasses.replace(recipe, expert_groups=0, chosen_groups=0)
    )


@pytest.mark.parametrize(("groups", "chosen"), [(4, 0), (0, 1), (4, 5)])
def test_tokens_choose_some_of_the_groups_that_there_are(groups: int, chosen: int) -> None:
    with pytest.raises(OptionsError, match="tokens choose from 1 to all of the groups"):
        Recipe(expert_groups=groups, chosen_groups=chosen)


def test_experts_divide_among_groups() -> None:
    with pytest.raises(OptionsError, match="a block has 16 experts, which do not divide among so many groups"):
        model().sections(Recipe(expert_groups=3, chosen_groups=1), H100)


def test_between_nodes_a_token_travels_once_to_each_node() -> None:
    """16 experts on two nodes of 8: no node has none of 4 chosen ones but with probability C(8, 4) / C(16, 4)."""
    layout = Recipe(data=16, expert=16, dispatch="tokens")
    nodes = 1000 * 2 * (1 - 70 / 1820)
    split = (1, 2, 8, 1)
    across = collective_seconds(H100, split, "all_to_all", (1,), 2 * nodes * 2048)
    inside = collective_seconds(H100, split, "all_to_all", (2,), 8 * 4000 * 2048)
    assert dispatch_seconds(H100, layout, block()) == pytest.approx(max(across, inside))
    by_rows = dispatch_seconds(H100, dataclasses.replace(layout, dispatch="rows"), block())
    assert by_rows == collective_seconds(H100, (1, 16, 1), "all_to_all", (1,), 16 * 4000 * 2048)
    assert by_rows > dispatch_seconds(H100, layout, block())


def test_gradients_of_weights_are_read_and_written_in_fp32() -> None:
    """With few rows each, products for gradients take what adding to them takes: 8 bytes an element."""
    few = block(rows=64.0, width=8192, up=8192, down=4096)
    elements = 16 * 8192 * (8192 + 4096)
    assert block_cost(few, Layout(), H100).backward > 8 * elements / H100.device.memory_bandwidth
    own, apart = (
        block_cost(few, layout_of(**named), H100)
        for named in ({"gradients": "own"}, {"gradient_accumulation_fusion": False})
    )
    saved = block_cost(few, Layout(), H100).backward - own.backward
    assert saved == pytest.approx((8 - 4) * elements / H100.device.memory_bandwidth, rel=0.02)
    assert apart.backward < own.backward


def test_gradients_of_a_single_microbatch_are_added_to_nothing() -> None:
    """A step of one microbatch has the products of one that adds up by operations of its own, of which it has none."""
    several, one = (model().sections(Layout(microbatch=4), H100, batch) for batch in (8, 4))
    apart = model().sections(Recipe(microbatch=4, gradient_accumulation_fusion=False), H100, 8)
    assert one.layers[0].backward.compute == apart.layers[0].backward.compute < several.layers[0].backward.compute
    single = Recipe(data=16, microbatch=4)
    priced, adding = (
        model().price(layout, H100)
        for layout in (single, dataclasses.replace(single, gradient_accumulation_fusion=False))
    )
    assert priced.predicted.step_seconds == adding.predicted.step_seconds


def test_rows_are_cast_to_fp8_before_products() -> None:
    """Each is read in bf16 and written twice in fp8, and its product reads a byte less; what it computes is next to
    nothing here."""
    wide = block(rows=1e6, up=16, down=16)
    plain, cast = (block_cost(wide, layout_of(precision=p), with_device(grouped_products=1.0)) for p in ("bf16", "fp8"))
    passed = 1e6 * 1024 * (2 + 2 - 1) / H100.device.memory_bandwidth
    assert cast.forward - plain.forward == pytest.approx(passed, rel=0.05)


def test_kernels_between_products_of_experts_are_slower_than_copies() -> None:
    """In layouts as in recipes."""
    for prices in (BlockPrices(Layout(), H100, True), RecipeBlocks(Recipe(), H100, True)):
        read = prices.passing(block(rows=1e7), 64) - prices.passing(block(rows=0.0), 64)
        assert BETWEEN * read == pytest.approx(1e7 * 64 * 2 / H100.device.memory_bandwidth, rel=0.01)


def test_products_of_experts_have_their_rate_in_layouts_as_in_plans() -> None:
    """Large ones take what the device's ``grouped_products`` says; in fp8 they are as fast as plain ones."""
    large = block(rows=1e6, width=8192, up=8192, down=8192)
    for precision, times in (("bf16", 2.0), ("fp8", 1.0)):
        quick, slow = (
            block_cost(large, layout_of(precision=precision), with_device(grouped_products=share))
            for share in (1.0, 0.5)
        )
        assert slow.forward == pytest.approx(times * quick.forward, rel=0.05)
        assert slow.backward == pytest.approx(times * quick.backward, rel=0.05)


def test_the_kernel_of_the_activations_gradient_may_be_slow() -> None:
    """One product of four in backward, and what the activation passes on."""
    large = block(rows=1e6, width=8192, up=8192, down=8192)
    usual, slow = (block_cost(large, Recipe(activation_gradient=times), H100) for times in (1.0, 5.0))
    assert slow.forward == usual.forward
    assert slow.backward == pytest.approx((1 + 4 / 4) * usual.backward, rel=0.05)


@pytest.mark.parametrize(("ranks", "times"), [(1, 0), (4, 2), (16, 0)])
def test_rows_of_an_all_to_all_are_put_in_the_order_of_several_experts(ranks: int, times: int) -> None:
    """And back, in each phase: each row is read and written. Those of one expert are in order as they arrive."""
    layout = Recipe(data=16, expert=ranks)
    by_rows, by_tokens = (
        block_cost(block(rows=1e6), dataclasses.replace(layout, dispatch=d), H100) for d in ("rows", "tokens")
    )
    passed = times * 1e6 * 2 * 1024 * 2 / (BETWEEN * H100.device.memory_bandwidth)
    assert by_rows.forward - by_tokens.forward == pytest.approx(passed, rel=0.02, abs=1e-9)
    assert by_rows.backward - by_tokens.backward == pytest.approx(passed, rel=0.02, abs=1e-9)


def test_experts_are_started_one_by_one_unless_they_are_a_graph() -> None:
    assert RecipeBlocks(Recipe(expert=4, data=4), H100, True).starts(block()) == (2 * 4 + ARRANGING, 4 * 4 + ARRANGING)
    slow, layout = with_host(1e-3), Recipe(cuda_graphs=("*attention*", "layers.?", "*norm*"))
    waiting = model().sections(layout, slow).layers[0]
    host = of_recipe(waiting).hosts[0]
    assert host > (2 * 16 + ARRANGING) * 1e-3 - (waiting.forward.compute - host)
    assert of_recipe(model().sections(Recipe(), slow).layers[0]).hosts == (0.0, 0.0)
    assert of_recipe(model().sections(layout, with_host(0.0)).layers[0]).hosts == (0.0, 0.0)
    step, quick = (model().price(layout, cluster) for cluster in (slow, with_host(0.0)))
    assert step.predicted.step_seconds > quick.predicted.step_seconds
    # Who waits for the host waits for no message.
    waited = step.predicted.compute_seconds - quick.predicted.compute_seconds
    assert waited == pytest.approx(step.parts["host"])
    assert step.predicted.comm_seconds == pytest.approx(quick.predicted.comm_seconds)
    assert step.parts["host"] == pytest.approx(step.predicted.step_seconds - quick.predicted.step_seconds, rel=0.01)


def test_what_is_hidden_takes_processors() -> None:
    layout = Recipe(data=8, expert=8)
    apart = model().price(layout, H100)
    hidden = model().price(dataclasses.replace(layout, overlap=(*layout.overlap, "expert")), H100)
    lower = apart.predicted.step_seconds - apart.parts["exchange"]
    assert lower < hidden.predicted.step_seconds < apart.predicted.step_seconds
    assert hidden.predicted.step_seconds >= lower + TAKEN * 0.5 * apart.parts["exchange"]


def test_the_first_forward_and_the_last_backward_have_no_other_microbatch_beside_them() -> None:
    """A single microbatch has none at all; of two every second exchange is not hidden, of eight one in eight."""

    def hidden(microbatch: int) -> float:
        layout = Recipe(data=8, expert=8, microbatch=microbatch)
        beside = dataclasses.replace(layout, overlap=(*layout.overlap, "expert"))
        first, second = (model().price(each, H100) for each in (layout, beside))
        return (first.predicted.step_seconds - second.predicted.step_seconds) / first.parts["exchange"]

    assert hidden(8) == pytest.approx(0.0, abs=1e-12)
    assert hidden(1) == pytest.approx((7 / 8) / (1 / 2) * hidden(4), rel=0.1)


@pytest.mark.slow
def test_what_a_pipeline_leaves_exposed_is_not_that_of_one_stage() -> None:
    """Whatever was priced before: a section's seconds are kept for layouts that are alike."""
    one = Recipe(data=8, expert=8, overlap=("expert",))
    three = dataclasses.replace(one, pipeline=3)
    alone = model.__wrapped__(SHAPE).price(three, H100).predicted.step_seconds
    assert model().price(one, H100).predicted.step_seconds > 0
    assert model().price(three, H100).predicted.step_seconds == alone


def test_the_head_may_be_in_fp8() -> None:
    plain, cast = (model().sections(Recipe(precision="fp8", fp8_head=said), H100) for said in (False, True))
    assert cast.after.forward.compute < plain.after.forward.compute
    assert cast.layers[0].forward == plain.layers[0].forward


def test_head_and_routers_stay_in_bf16() -> None:
    plain, cast = (model().sections(layout_of(precision=p), H100) for p in ("bf16", "fp8"))
    assert cast.after.forward == plain.after.forward
    assert cast.layers[0].forward.compute != plain.layers[0].forward.compute


@pytest.mark.slow
def test_a_further_token_is_predicted_by_a_layer_more() -> None:
    further = dataclasses.replace(SHAPE, beyond=1)
    plain, more = (model(shape).price(Layout(), H100) for shape in (SHAPE, further))
    layer = (model().sections(Layout(), H100)).layers[0].flops
    head, projection = 6 * 256 * 512 * 1024, 6 * 256 * 512 * 2 * 512
    assert more.flops - plain.flops == pytest.approx(64 * (layer + head + projection))


def test_experts_are_not_computed_again_by_themselves() -> None:
    with pytest.raises(OptionsError, match=r"names layers.0.mlp, whose experts are priced separately"):
        model().sections(Recipe(recomputed=("*.mlp",)), H100)
    shared = model().sections(Recipe(recomputed=("*.norm2",)), H100).layers[0]
    assert shared.saved_again > 0
