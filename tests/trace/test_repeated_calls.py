"""Calls of equal layers are recorded without running them, and the trace is that of a model whose layers all run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn

from autopar.trace import repeated_calls
from autopar.trace.repeated_calls import RepeatedCalls
from autopar.trace.tracer import Traced, trace
from tests.helpers.marks import slow_but

LAYERS = 7
WIDTH = 6
Batch = dict[str, Any] | tuple[Any, ...]


@contextmanager
def counting() -> Iterator[list[str]]:
    """The paths of the calls that are not run."""
    skipped: list[str] = []
    skip = RepeatedCalls._skip

    def counted(self: RepeatedCalls, template: Any, module: nn.Module, numbers: Any, match: Any) -> Any:
        skipped.append(self.paths[id(module)])
        return skip(self, template, module, numbers, match)

    with patch.object(RepeatedCalls, "_skip", counted):
        yield skipped


def traced(model: nn.Module, batch: Batch) -> Traced:
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* when it is called, but a captured graph")
        return trace(model, args, kwargs, device="cpu", training=True)


def skipped_calls(model: nn.Module, batch: Batch) -> list[str]:
    """The calls that are not run, if the trace is that of a model whose calls all run."""
    with patch.object(repeated_calls, "elements_of_lists", lambda _: frozenset()), counting() as none:
        whole = traced(model, batch)
    with counting() as skipped:
        short = traced(model, batch)
    assert not none
    assert short.graph.to_text() == whole.graph.to_text()
    assert [node.source for node in short.graph] == [node.source for node in whole.graph]
    assert (short.guards, short.notes, short.counted) == (whole.guards, whole.notes, whole.counted)
    assert short.read_names == whole.read_names
    assert short.signature == whole.signature
    return skipped


SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 61,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}
DEEP: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 20, "num_heads": 4, "vocab_size": 61, "use_cache": False}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
# Kinds of models, and how many of their calls at least need not run: of each class of layers two run.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}, LAYERS - 2),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": LAYERS, "n_embd": 24, "n_head": 4, "vocab_size": 61}, 0),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
        LAYERS - 4,
    ),
    "bert": ("BertForMaskedLM", {**SMALL, "max_position_embeddings": 16}, LAYERS - 2),
    "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 20, "word_embed_proj_dim": 24, "max_position_embeddings": 16}, 1),
    "mixtral": ("MixtralForCausalLM", {**SMALL, "num_local_experts": 4, "num_key_value_heads": 4}, 0),
    "deepseek": ("DeepseekV3ForCausalLM", {**SMALL, "first_k_dense_replace": 2, **LATENT, **ROUTED}, 0),
    "t5": ("T5ForConditionalGeneration", {**DEEP, "num_layers": LAYERS, "decoder_start_token_id": 0}, 0),
    "mamba": ("MambaForCausalLM", {**SMALL, "state_size": 4}, 0),
}


@pytest.mark.parametrize("kind", slow_but(["llama"], FAMILIES))
def test_the_trace_is_that_of_all_layers(kind: str) -> None:
    family, settings, least = FAMILIES[kind]
    with torch.device("meta"):
        model = getattr(transformers, family)(getattr(transformers, family).config_class(**settings))
    tokens = torch.randint(3, 60, (4, 8))
    assert len(skipped_calls(model, {"input_ids": tokens, "labels": tokens.clone()})) >= least


class Layer(nn.Module):
    """A layer of two dozen operations, which changes as its subclasses say."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.inner = index, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + torch.tanh(self.inner(x)) * 0.5
        return self.also(x)

    def also(self, x: Tensor) -> Tensor:
        return x * 2.0


class Indexed(Layer):
    def also(self, x: Tensor) -> Tensor:
        return x * (2.0 + (self.index == 5))


class Global(Layer):
    calls: list[int] = []  # noqa: RUF012

    def also(self, x: Tensor) -> Tensor:
        self.calls.append(0)
        return x * (3.0 if len(self.calls) % LAYERS == 5 else 2.0)


class Counting(Layer):
    def also(self, x: Tensor) -> Tensor:
        self.index += 1
        return x * 2.0


class WithBuffer(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)

    def also(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


class Dropping(Layer):
    def also(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1, self.training)


class Normed(Layer):
    """RMSNorm writes to a sum of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.RMSNorm(WIDTH)

    def also(self, x: Tensor) -> Tensor:
        return super().also(self.norm(x))


class OwnSums(Layer):
    """Returns what it wrote to."""

    def also(self, x: Tensor) -> Tensor:
        return (x * 2.0).add_(1.0)


class Weights(Layer):
    """Divides what it made by its sum, as routers of experts do."""

    def also(self, x: Tensor) -> Tensor:
        weights = x.tanh() + 2.0
        weights /= weights.sum(-1, keepdim=True)
        return x * weights


class WrittenViews(Layer):
    """Writes to a part of what it made, and reads the whole."""

    def also(self, x: Tensor) -> Tensor:
        whole = x * 2.0
        whole[:, :2].add_(1.0)
        return whole * 1.5


class InPlace(Layer):
    """Changes what it gets."""

    def also(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class Viewing(Layer):
    """Also returns a view of what it computes."""

    def also(self, x: Tensor) -> Tensor:
        return (x * 2.0).view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(x.shape)


class Stack(nn.Module):
    """Layers one after the other; ``change`` is made to the model once it exists."""

    def __init__(self, kind: type[Layer], change: Callable[[Stack], object] = lambda _: None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # So that what the first layer gets requires a gradient too.
        self.layers = nn.ModuleList(kind(index) for index in range(LAYERS))
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Outside(Stack):
    """Decides outside of its layers what they get, by their number and by how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            x = layer(x * 3.0 if index == 4 else x)
            if index + 2 == len(self.layers):
                x.add_(1.0)
        return x.square().mean()


def _tie(model: Stack) -> None:
    model.layers[3].inner.weight = model.layers[1].inner.weight  # type: ignore[union-attr]


def _freeze(model: Stack) -> None:
    model.layers[4].requires_grad_(False)


def _share(model: Stack) -> None:
    for layer in model.layers:
        layer.inner = model.layers[0].inner


def _hook(model: Stack) -> None:
    model.layers[4].register_forward_hook(lambda module, args, output: output * 3.0)


def _replace(model: Stack) -> None:
    own = model.layers[4].forward
    model.layers[4].forward = lambda x: own(x) * 3.0


def _evaluate(model: Stack) -> None:
    model.layers[4].training = False


def _repeat(model: Stack) -> None:
    model.layers = nn.ModuleList([model.layers[0]] * LAYERS)


STACKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (lambda: Stack(Layer), LAYERS - 2),
    "outside": (lambda: Outside(Layer), LAYERS - 2),
    "indexed": (lambda: Stack(Indexed), 0),
    "global": (lambda: Stack(Global), 0),
    "counting": (lambda: Stack(Counting), 0),
    "buffers": (lambda: Stack(WithBuffer), 0),
    "dropping": (lambda: Stack(Dropping), LAYERS - 2),
    "in place": (lambda: Stack(InPlace), 0),
    "norms": (lambda: Stack(Normed), LAYERS - 2),
    "own sums": (lambda: Stack(OwnSums), LAYERS - 2),
    "weights": (lambda: Stack(Weights), LAYERS - 2),
    "written views": (lambda: Stack(WrittenViews), 0),
    "views": (lambda: Stack(Viewing), LAYERS - 2),
    "tied": (lambda: Stack(Layer, _tie), LAYERS - 2),
    "frozen": (lambda: Stack(Layer, _freeze), LAYERS - 3),
    "shared": (lambda: Stack(Layer, _share), 0),
    "hooks": (lambda: Stack(Layer, _hook), LAYERS - 3),
    "replaced": (lambda: Stack(Layer, _replace), 0),
    "evaluating": (lambda: Stack(Dropping, _evaluate), LAYERS - 3),
    "repeated": (lambda: Stack(Layer, _repeat), LAYERS - 2),
}


@pytest.mark.parametrize("kind", slow_but(["plain", "indexed", "global"], STACKS))
def test_what_layers_do_besides(kind: str) -> None:
    """Whatever layers do, the trace is that of all of them; where they are alike, few of them run."""
    Global.calls.clear()
    make, least = STACKS[kind]
    assert len(skipped_calls(make(), (torch.randn(4, WIDTH),))) >= least


@pytest.mark.parametrize("kind", ["indexed", "buffers"])
def test_unlike_layers_run(kind: str) -> None:
    assert skipped_calls(STACKS[kind][0](), (torch.randn(4, WIDTH),)) == []


def test_a_run_that_was_shortened_for_nothing_is_repeated() -> None:
    """A counter in Python is seen only when the model has run."""
    Global.calls.clear()
    graph = traced(Stack(Global), (torch.randn(4, WIDTH),)).graph
    factors = [node.args[1] for node in graph if node.op == "aten.mul.Tensor" and node.phase == "forward"]
    assert factors.count(3.0) == 1
