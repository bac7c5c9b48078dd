"""Equal calls of modules are captured once, and the graph is that of the whole model; what only looks equal is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import TraceError
from autopar.trace.record import UnrecordedError
from autopar.trace.tracer import trace
from tests.helpers.marks import slow_but, slow_rows_but
from tests.helpers.outlined import Batch, assert_same, captured, request_for
from tests.helpers.stacks import Block, Frozen, OneDiffers, Skips, Stack, Tied, Transposed

LAYERS = 4
SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 61,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MOE = {"num_key_value_heads": 4, "num_experts_per_tok": 2}


def meta(kind: str, **settings: Any) -> nn.Module:
    """A model of transformers without storage."""
    family = getattr(transformers, kind)
    with torch.device("meta"):
        model: nn.Module = family(family.config_class(**settings))
        return model


def text() -> Batch:
    tokens = torch.randint(3, 60, (4, 8))
    return {"input_ids": tokens, "labels": tokens.clone()}


def llama() -> nn.Module:
    return meta("LlamaForCausalLM", num_key_value_heads=2, **SMALL)


def gemma2() -> nn.Module:
    return meta("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=4, **SMALL)


def bert() -> nn.Module:
    return meta("BertForMaskedLM", max_position_embeddings=16, **SMALL)


def opt() -> nn.Module:
    return meta("OPTForCausalLM", ffn_dim=20, word_embed_proj_dim=24, max_position_embeddings=16, **SMALL)


def mixtral() -> nn.Module:
    return meta("MixtralForCausalLM", num_local_experts=4, **MOE, **SMALL)


def t5() -> nn.Module:
    special = {"pad_token_id": 0, "decoder_start_token_id": 0}
    return meta(
        "T5ForConditionalGeneration", d_model=24, d_kv=6, d_ff=20, num_layers=4, num_heads=4, vocab_size=61, **special
    )


def deepseek() -> nn.Module:
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12}
    return meta("DeepseekV3ForCausalLM", first_k_dense_replace=2, **latent, **experts, **MOE, **SMALL)


def gpt2(**settings: Any) -> nn.Module:
    return meta("GPT2LMHeadModel", vocab_size=61, n_layer=LAYERS, n_embd=24, n_head=4, n_positions=16, **settings)


# How many calls are taken out of line: one a layer, the layers of each class together. T5's first layers differ.
FAMILIES = [
    (llama, 4),
    *(pytest.param(make, 4, marks=pytest.mark.slow) for make in (mixtral, gpt2, gemma2, bert, opt, deepseek, t5)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "calls"), FAMILIES, ids=lambda value: getattr(value, "__name__", ""))
def test_equal_layers_are_captured_once(make: Callable[[], nn.Module], calls: int) -> None:
    assert assert_same(make(), text()) >= calls


@pytest.mark.slow
def test_constants_that_differ_by_layer_stay_apart() -> None:
    """What layers share all the same, their feed-forward parts, is captured once."""
    model = gpt2(scale_attn_by_inverse_layer_idx=True, attn_implementation="eager")
    assert assert_same(model, text()) == LAYERS


@pytest.mark.slow
def test_outputs_of_every_layer() -> None:
    model = llama()
    model.config.output_hidden_states = True  # type: ignore[union-attr]
    assert assert_same(model, text(), differentiate="all") == LAYERS


@pytest.mark.slow
def test_without_gradients_and_with_real_sizes() -> None:
    model = llama().eval()
    assert assert_same(model, text(), grad=False) == LAYERS
    assert assert_same(model, text(), symbolic=False) == LAYERS


class Scaled(Stack):
    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return block(x, 1.0 + index // 4)


class ByNumbers(Stack):
    """Numbers made of the batch size, within layers and outside of them, as losses that balance experts make."""

    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return block(x, 2.0 * x.shape[0] / 3) / (x.shape[0] / 2 + x.shape[1] + 0.5)


class UsedTwice(Stack):
    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return self.blocks[index // 2](x)


class Appending(Block):
    """Tells its neighbours by a list that belongs to nobody."""

    seen: list[Tensor]

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        made = super().forward(x, factor)
        self.seen.append(made.sum(0) * 3)
        return made


class Appends(Stack):
    block = Appending

    def run(self, x: Tensor) -> Tensor:
        Appending.seen = []
        made = super().run(x)
        seen, Appending.seen = Appending.seen, []
        return made + torch.stack(seen[::3]).mean(0)


class Dropping(Stack):
    """Stochastic depth: the deeper, the likelier a block is left out; two have the same chance."""

    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        kept = torch.bernoulli(torch.full((x.shape[0], 1), 1.0 - 0.1 * (index // 2)))
        return x + block(torch.nn.functional.dropout(x, 0.1 * (index // 2))) * kept


class Partial(Block):
    """Returns more than is differentiated, and something of its own without gradient."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Any:
        made = super().forward(x, factor)
        with torch.no_grad():
            level = (made * self.scale).mean()
        return made, made.detach() * self.scale, level


class Auxiliary(Stack):
    """Only two blocks' second results count, and one's is all that counts of it."""

    block = Partial

    def run(self, x: Tensor) -> Tensor:
        extra = torch.zeros(())
        for index, block in enumerate(self.blocks):
            made, aside, level = block(x)
            x = made.detach() if index == 4 else made
            extra = extra + level + (aside.mean() if index in (2, 4) else 0.0)
        return x + extra


class WritesBetween(Stack):
    """Writes into what a block returned, which it may have kept for its backward as well."""

    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return block(x).mul_(0.5)


class WritingInside(Block):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        inner = self.down(self.up(x)).add_(x).relu_()
        return super().forward(inner, factor).clamp_(-3, 3)


class WritesInside(Stack):
    block = WritingInside


class Checkpointed(Stack):
    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=index % 2 == 0)


class Normalising(Block):
    """Batch norm writes its statistics, which are seen from outside."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(self.batch_norm(x), factor)


class Normalises(Stack):
    block = Normalising


# The first block differs from the others: its input needs no gradient. Two equal blocks are too few to pay.
CASES: list[tuple[type[Stack], int]] = [
    (Stack, 7), (OneDiffers, 6), (Scaled, 7), (UsedTwice, 7), (Skips, 7), (Tied, 7), (Appends, 5), (Dropping, 7),
    (Auxiliary, 4), (Frozen, 7), (WritesInside, 7), (Checkpointed, 7), (Transposed, 7), (ByNumbers, 7),
]  # fmt: skip
# One that differs, one with tied weights, one that draws, one with numbers made of sizes.
QUICK = (1, 5, 7, 13)


@pytest.mark.parametrize(
    ("kind", "calls"), slow_rows_but(QUICK, CASES), ids=lambda value: getattr(value, "__name__", "")
)
def test_odd_models(kind: type[Stack], calls: int) -> None:
    assert assert_same(kind(), (torch.randn(4, 6),)) == calls


@pytest.mark.parametrize("kind", [WritesBetween, Normalises])
def test_what_is_written_to_and_seen_elsewhere_stays_in_line(kind: type[Stack]) -> None:
    with pytest.raises(UnrecordedError, match="no two calls"):
        captured(request_for(kind(), (torch.randn(4, 6),)), outlined=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Own(Stack):
    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        return Doubled.apply(block(x))


class Hooked(Stack):
    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        x = block(x)
        x.register_hook(lambda gradient: gradient * 2)
        return x


class Catching(Stack):
    """Catches whatever its own derivative raises."""

    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        try:
            return Doubled.apply(block(x))
        except Exception:
            return block(x)


@pytest.mark.parametrize("kind", slow_but([Own], [Own, Hooked, Catching]))
def test_a_derivative_of_its_own_is_respected(kind: type[Stack]) -> None:
    model, batch = kind(), (torch.randn(4, 6),)
    with pytest.raises(UnrecordedError, match="what autograd does"):
        captured(request_for(model, batch), outlined=True)
    graph = trace(model, batch, device="cpu").graph
    plain = trace(Stack(), batch, device="cpu").graph
    doublings = [n for n in graph if n.op == "aten.mul.Tensor" and n.phase == "backward" and n.args[1] == 2]
    expected = [n for n in plain if n.op == "aten.mul.Tensor" and n.phase == "backward" and n.args[1] == 2]
    assert len(doublings) >= len(expected) + 8


class Failing(Stack):
    def step(self, index: int, block: nn.Module, x: Tensor) -> Any:
        self.mark = index
        block.register_forward_hook(lambda *_: None)
        if index == 6:
            raise ValueError("on purpose")
        return block(x)


def test_the_model_is_left_alone_when_it_fails() -> None:
    model = Failing()
    before = [dict(module.__dict__) for module in model.modules()]
    hooks = torch.autograd.Function.__dict__.get("apply"), torch.Tensor.register_hook, torch.autograd.grad
    with pytest.raises(TraceError, match="on purpose"):
        trace(model, (torch.randn(4, 6),), device="cpu")
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert not any(block._forward_hooks for block in model.blocks)
    assert (torch.autograd.Function.__dict__.get("apply"), torch.Tensor.register_hook, torch.autograd.grad) == hooks


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
