"""Small language models of transformers, and generation on local processes beside one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import autopar
from autopar.runtime import run_local

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 501}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=3, vocab_size=50257, n_positions=128)
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_GROUPED, tie_word_embeddings=True)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_GROUPED, sliding_window=6)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**_GROUPED, num_local_experts=4)),
    "gpt2": _gpt2,
}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with random weights, the same each time."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval()
    model.generation_config.pad_token_id = 0  # type: ignore[union-attr]
    model.generation_config.eos_token_id = 7  # type: ignore[union-attr]
    return model


def prompts(name: str, rows: int = 4, length: int = 9) -> dict[str, torch.Tensor]:
    """Prompts of several lengths, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, 500, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : row % (length - 1)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generated(
    rank: int, nprocs: int, name: str, mesh: Any, options: dict[str, Any], calls: list[dict[str, Any]]
) -> Any:
    """The tokens of each of ``calls`` of ``generate``, a text of the plan, and the number of programs."""
    dtype = options.pop("dtype", torch.float32)
    model = autopar.parallelize(make(name, dtype), mesh, mode="inference", options=autopar.Options(**options))
    tokens = []
    for call in calls:
        torch.manual_seed(5 + rank)  # The first rank's is used.
        tokens.append(model.generate(**{**prompts(name), **call}))
    return tokens, str(model.plan), len(model.programs())


def expected(name: str, calls: list[dict[str, Any]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What one process generates."""
    model, tokens = make(name, dtype), []
    for call in calls:
        torch.manual_seed(5)
        tokens.append(model.generate(**{**prompts(name), **call}))  # type: ignore[operator]
    return tokens


def check(name: str, mesh: tuple[int, ...], options: dict[str, Any], calls: list[dict[str, Any]]) -> tuple[str, int]:
    """Checks that every rank generates the tokens of one process; returns the plan as text, and how many programs."""
    wanted, nprocs = expected(name, calls, options.get("dtype", torch.float32)), 1
    for size in mesh:
        nprocs *= size
    results = run_local(generated, nprocs, timeout=300, args=(name, mesh, options, calls))
    for tokens, _, _ in results:
        for found, right in zip(tokens, wanted, strict=True):
            assert torch.equal(found, right), f"{found}\nbut one process generates\n{right}"
    return results[0][1], results[0][2]
