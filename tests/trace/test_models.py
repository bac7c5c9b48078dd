"""Traced graphs of real models give the loss, every gradient and every buffer update of eager autograd, at
any batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.ir.graph import Graph
from autopar.passes.normalise.standard import normalise
from autopar.trace.tracer import trace
from tests.helpers.eager import Batch, assert_same_step, doubled
from tests.helpers.marks import slow_but

Case = tuple[nn.Module, Callable[[int], Batch]]


def text_batch(size: int) -> Batch:
    tokens = torch.randint(3, 60, (size, 8))
    labels = tokens.clone()
    labels[:, :2] = -100
    labels[0, :6] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def image_batch(size: int) -> Batch:
    return {"pixel_values": torch.randn(size, 3, 8, 8), "labels": torch.randint(0, 5, (size,))}


SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 20,
}


class Plain(nn.Module):
    """One tensor twice in one operation, a parameter used twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.steps = self.steps + 1
        hidden = torch.tanh(self.first(x)) * self.frozen
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        hidden = hidden * hidden + torch.mm(hidden, hidden.t()).mean() * scale
        return {"loss": (self.second(hidden) ** 2).mean(), "hidden": hidden}


def plain() -> Case:
    return Plain(), lambda size: {"x": torch.randn(size, 6)}


def gpt2() -> Case:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=61, n_layer=2, n_embd=24, n_head=4, n_positions=16, **dropout, **SPECIAL
    )
    return transformers.GPT2LMHeadModel(config), text_batch


def llama() -> Case:
    config = transformers.LlamaConfig(vocab_size=61, num_key_value_heads=2, **SMALL, **SPECIAL)
    return transformers.LlamaForCausalLM(config), text_batch


def bert() -> Case:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=61, max_position_embeddings=16, **dropout, **SMALL, **SPECIAL)
    return transformers.BertForMaskedLM(config), text_batch


def vit() -> Case:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=5, **SMALL)
    return transformers.ViTForImageClassification(config), image_batch


def resnet() -> Case:
    config = transformers.ResNetConfig(
        embedding_size=6, hidden_sizes=[6, 8], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), image_batch


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        vocab_size=61,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="batched_mm",
        **SMALL,
        **SPECIAL,
    )
    return transformers.MixtralForCausalLM(config), text_batch


CASES = [plain, gpt2, llama, bert, vit, resnet, mixtral]


@pytest.mark.parametrize(
    # The others are traced by tests of what is done with them.
    "case",
    slow_but([plain, resnet], CASES),
    ids=lambda case: case.__name__,
)
def test_same_as_eager(case: Callable[[], Case]) -> None:
    model, make = case()
    model.double().train()
    traced = trace(model, (), doubled(make(4)), device="cpu")
    normal = normalise(traced.graph)
    assert traced.graph.symbols == normal.symbols == (("b", 4),)
    for graph in (traced.graph, normal):
        assert Graph.from_text(graph.to_text()) == graph
        for size in (4, 7):
            batch = doubled(make(size))
            assert_same_step(graph.at(b=size), traced, model, batch, loss_of=lambda out: out["loss"])


def test_the_model_is_left_alone() -> None:
    model, make = plain()
    before = {name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    trace(model, (), make(4), device="cpu", training=False)
    after = {name: (id(t), t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert before.keys() == after.keys()
    for name, (identity, value) in before.items():
        assert after[name][0] == identity and torch.equal(after[name][1], value), name
    assert model.training and all(child.training for child in model.modules())
    assert not torch.compiler._is_compiling_flag and not torch.compiler._is_exporting_flag


def test_tied_weights_are_one_parameter_with_one_gradient() -> None:
    model, make = plain()
    traced = trace(model, (), make(4), device="cpu")
    assert traced.signature.tied == {"second.weight": "first.weight"}
    targets = [node.target for node in traced.graph.placeholders("param")]
    assert targets == ["unused", "frozen", "first.weight", "first.bias", "second.bias"]
    gradients = {o.name: o.value for o in traced.graph.outputs if o.kind == "gradient"}
    assert list(gradients) == targets
    assert gradients["unused"] is None and gradients["frozen"] is None and gradients["first.weight"] is not None
    assert traced.parameters == {name: name != "frozen" for name in targets}
    assert {o.name for o in traced.graph.outputs if o.kind == "mutation"} == {"steps", "average"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["meta", "real", "fake"])
def test_any_kind_of_model_gives_the_same_graph(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, make = llama()
    expected = trace(model, (), make(4), device="cpu").graph
    batch: dict[str, Any] = make(4)
    if kind == "meta":
        with torch.device("meta"):
            model = llama()[0]
        batch = {name: tensor.to("meta") for name, tensor in batch.items()}
    if kind == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model = llama()[0]
        batch = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
    assert trace(model, (), batch, device="cpu").graph.to_text() == expected.to_text()


def test_output_comes_back_as_the_models_own_type() -> None:
    from torch.utils import _pytree as pytree

    model, make = gpt2()
    signature = trace(model, (), make(4), device="cpu").signature
    leaves = [
        signature.output_constants[i] if name is None else f"output {name}"
        for i, name in enumerate(signature.output_names)
    ]
    rebuilt = pytree.tree_unflatten(leaves, signature.output_spec)
    assert type(rebuilt).__name__ == "CausalLMOutputWithCrossAttentions"
    assert rebuilt.loss == "output 0" and rebuilt.logits == "output 1" and rebuilt.past_key_values is None
    assert (signature.loss, signature.differentiable, model.config.use_cache) == ("0", ("0",), True)


def test_every_node_knows_its_module() -> None:
    model, make = llama()
    graph = normalise(trace(model, (), make(4), device="cpu").graph)
    known = {path for path, _ in model.named_modules()}
    assert {node.module for node in graph} <= known
    attention = "model.layers.1.self_attn.q_proj"
    phases = [node.phase for node in graph if node.op == "aten.mm.default" and node.module == attention]
    assert phases == ["forward", "backward", "backward"]
