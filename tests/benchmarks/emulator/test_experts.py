"""Experts divided among data ranks: what is held, computed, exchanged and reduced, and what the search makes of it."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
import transformers as hf

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.cost.collective.collective import copying_seconds
from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.planner.roles.expert_blocks import BACKWARD, routers
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced
from benchmarks.emulator.search import best_layout
from benchmarks.emulator.space import candidates, expert_degrees
from benchmarks.emulator.step.section_seconds import BYTES_OF_A_RANK
from benchmarks.published_models import Decoder, build
from benchmarks.published_shape import Experts, Latent, Shape
from benchmarks.recipes import Recipe
from tests.helpers.recipes import block_cost, layout_of

A100 = Cluster.get("dgx-a100-80gb")
SHAPE = Shape(
    6, 512, 8, 8, 64, 2048, gated=True, vocab=1024, seq=256, flash=True, experts=Experts(16, 2, 512, shared=1, dense=1)
)
BATCH = 64


def batch(shape: Shape = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.empty(BATCH, shape.seq, dtype=torch.long, device="meta")
    return ids, ids


@cache
def model() -> LayoutModel:
    return LayoutModel.of(build(SHAPE), batch())


def price(**named: object) -> Priced:
    return model().price(layout_of(**named), A100)  # type: ignore[arg-type]


def weights(degree: int) -> tuple[int, int]:
    """Bytes of weights that are and are not of experts, on a device."""
    found = model().sections(Layout(data=16, expert=degree), A100)
    every = [weight for section in found.every for weight in section.weights]
    return tuple(sum(w.elements * w.itemsize for w in every if bool(w.experts) == kind) for kind in (True, False))  # type: ignore[return-value]


def test_layers_with_and_without_experts_stand_for_their_own() -> None:
    assert model().depth.priced_as == (0, 1, 2, 3, 3, 3)
    assert model().experts == 16
    whole = sum(parameter.numel() for parameter in build(SHAPE).parameters())
    assert sum(weights(1)) == 2 * whole


def test_experts_are_divided_and_nothing_else() -> None:
    (all_experts, rest), (quarter, same) = weights(1), weights(4)
    assert (quarter, same) == (all_experts // 4, rest)
    assert all_experts == 5 * 16 * 3 * 512 * 512 * 2


def test_states_of_experts_are_divided_among_the_ranks_that_share_them() -> None:
    """ZeRO divides over data / expert ranks what belongs to experts, over all data ranks the rest."""
    experts, rest = weights(4)
    held = price(data=16, expert=4, zero=1).predicted.optimizer_bytes
    assert held == pytest.approx(6 * (experts / 4 + rest / 16), rel=0.01)


def test_an_exchange_moves_each_chosen_row_there_and_back() -> None:
    layout = Layout(data=8, expert=8)
    section = model().sections(layout, A100).layers[1]
    rows = 1 * SHAPE.seq * 2
    assert section.exchanged == (rows * SHAPE.hidden * 2,)
    one = collective_seconds(A100, (1, 8, 1), "all_to_all", (1,), 8 * section.exchanged[0])
    microbatches, blocks = BATCH // 8, 5
    assert price(data=8, expert=8).parts["exchange"] == pytest.approx(microbatches * blocks * 4 * one)
    again = price(data=8, expert=8, recompute="full").parts["exchange"]
    assert again == pytest.approx(microbatches * blocks * 6 * one)
    assert model().sections(Layout(data=8), A100).layers[1].exchanged == ()


def test_gradients_of_experts_are_reduced_over_the_other_ranks() -> None:
    """All experts on every rank: all gradients over 16 ranks; one expert per rank: only the rest, in a bucket."""
    every, own = (price(data=16, expert=degree, overlap=()).parts["reduce"] for degree in (1, 16))
    rest, bucket = 2 * weights(1)[1], 16 * BYTES_OF_A_RANK
    assert rest < bucket < 2 * sum(weights(1))
    share = rest / bucket * collective_seconds(A100, (16, 1, 1), "all_reduce", (0,), bucket)
    assert own == pytest.approx(copying_seconds(A100.device, rest) + share)
    assert own < every


@pytest.mark.slow
def test_work_is_the_same_however_experts_are_divided() -> None:
    whole = price(microbatch=4).flops
    for named in ({"expert": 4}, {"expert": 8, "tensor": 2}):
        assert price(data=8, microbatch=4, **named).flops == pytest.approx(whole)
    dense = dataclasses.replace(SHAPE, experts=None, ffn=3 * 512)
    # Two of the experts and the shared one are as many products as one MLP three times as wide; routers besides.
    experts_everywhere = dataclasses.replace(SHAPE, experts=Experts(16, 2, 512, shared=1))
    assert build(dense).layers[0].mlp.up.weight.shape[0] == 1536
    found = [LayoutModel.of(build(one), batch()).price(Layout(), A100).flops for one in (dense, experts_everywhere)]
    routing = 6 * 6 * BATCH * SHAPE.seq * SHAPE.hidden * 16
    assert found[1] == pytest.approx(found[0] + routing)


def test_rows_are_slots_where_there_is_a_capacity() -> None:
    plain, padded = (
        model().sections(Recipe(data=8, expert=8, capacity=capacity), A100).layers[1] for capacity in (1.0, 1.25)
    )
    assert padded.exchanged[0] == pytest.approx(1.25 * plain.exchanged[0])
    assert padded.saved > plain.saved and padded.forward.compute >= plain.forward.compute


def test_exchanges_hide_under_another_microbatch() -> None:
    named = {"data": 16, "pipeline": 2, "expert": 16}
    hidden = price(**named, overlap=("message", "gradient", "expert")).predicted.step_seconds
    assert hidden < price(**named, overlap=("message", "gradient")).predicted.step_seconds


def test_larger_groups_of_rows_compute_quicker_per_row() -> None:
    found = model().sections(Layout(data=16), A100).layers[1].blocks[0]
    few, many = (dataclasses.replace(found, rows=rows, held=held) for rows, held in ((256.0, 16), (256.0, 2)))
    assert block_cost(many, Layout(), A100).forward < block_cost(few, Layout(), A100).forward


def test_routers_are_whole_on_every_tensor_rank() -> None:
    placed = model().placed(Layout(tensor=2), A100)
    found = routers(placed.graph)
    assert {placed.graph[name].target for name in found} == {f"layers.{i}.mlp.router.weight" for i in (1, 2, 3)}
    assert all(
        place == placed.assignment.replicated for name in found for place in [placed.assignment.parameters[name].weight]
    )
    assert any(node.op == BACKWARD for node in placed.graph.nodes)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"data": 32, "expert": 32}, "mlp has 16 experts, which do not divide among 32 ranks; expert=16 does"),
        (
            {"data": 16, "tensor": 2, "expert": 16},
            "16 experts / 2 tensor ranks, which do not divide among 16 ranks; expert=8 does",
        ),
    ],
)
def test_what_does_not_divide_is_refused(named: dict[str, int], said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        price(**named)


def test_a_dense_model_has_no_experts_to_divide() -> None:
    dense = LayoutModel.of(build(dataclasses.replace(SHAPE, experts=None, layers=3)), batch())
    with pytest.raises(OptionsError, match="no block of experts"):
        dense.price(Layout(data=4, expert=2), A100)
    with pytest.raises(OptionsError, match="capacity=0"):
        Recipe(capacity=0)


def test_every_way_to_divide_experts_is_tried() -> None:
    assert expert_degrees(16, 2, 12) == [1, 2, 4]
    assert expert_degrees(0, 1, 8) == [1]
    tried = {(layout.data, layout.expert) for layout in candidates(8, 64, 6, 8, experts=16)}
    assert {(8, 1), (8, 2), (8, 4), (8, 8), (4, 4)} <= tried


@pytest.mark.slow
def test_the_search_divides_experts_where_they_do_not_fit() -> None:
    pairs = A100.with_node(2)
    limit = model().price(Layout(data=4, zero=1), pairs).predicted.peak_bytes * 2 // 3
    found = best_layout(model(), pairs, 4, batch=BATCH, limit=limit)
    assert found.best.fits and found.best.layout.expert > 1
    assert found.rule is not None and found.rule.layout.expert == found.rule.layout.data


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_models_of_transformers(family: str) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False}
    if family == "mixtral":
        config = hf.MixtralConfig(**sizes, num_local_experts=8)
    else:
        config = hf.Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=32)
    with torch.device("meta"):
        found = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.empty(16, 64, dtype=torch.long, device="meta")
    traced = LayoutModel.of(found, {"input_ids": ids, "labels": ids})
    assert traced.experts == 8
    whole, divided = (traced.price(Layout(data=8, expert=degree), A100).predicted for degree in (1, 8))
    assert divided.weight_bytes < whole.weight_bytes and divided.step_seconds > 0


@pytest.mark.parametrize("kind", ["experts", "latent", "window"])
def test_decoders_compute(kind: str) -> None:
    small = Shape(2, 16, 2, 2, 8, 32, gated=True, vocab=32, seq=8, flash=True)
    changes: dict[str, object] = {
        "experts": {"experts": Experts(4, 2, 8, shared=1)},
        "latent": {"latent": Latent(query=8, key_value=8, head=4, rotary=4, value=4)},
        "window": {"window": 4, "kv_heads": 1},
    }[kind]  # type: ignore[assignment]
    decoder = Decoder(dataclasses.replace(small, **changes)).double()  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.5)
    ids = torch.randint(0, 32, (2, 8))
    loss = decoder(ids, ids)
    loss.backward()
    assert loss.isfinite() and all(parameter.grad is not None for parameter in decoder.parameters())


def test_a_window_is_what_a_mask_of_it_gives() -> None:
    from benchmarks.published_attention import windowed

    query, key, value = (torch.randn(2, heads, 12, 4, dtype=torch.double) for heads in (4, 2, 2))
    row, column = torch.arange(12)[:, None], torch.arange(12)
    mask = (column <= row) & (column > row - 4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(windowed(query, key, value, 4), expected)
