"""The inputs of one step of generation: a token for each sequence, and the cache of those before it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.torch_internals.hugging_face import cache_name


def check_generates(model: nn.Module) -> None:
    """Raises :class:`AutoparError` unless ``model`` is a causal language model of transformers."""
    kind = type(model).__name__
    if not hasattr(model, "prepare_inputs_for_generation") or not hasattr(model, "config"):
        raise AutoparError(
            f"{kind} has no generate(): models of transformers with a language modelling head have, such as "
            "LlamaForCausalLM. Call model(...) for a forward"
        )
    if model.config.is_encoder_decoder:  # type: ignore[union-attr]
        raise AutoparError(
            f"{kind} has an encoder and a decoder, whose caches a compiled step does not take: generate on whole "
            "parameters, on every rank: `with model.full_params() as whole: whole.generate(...)`. model(...) is "
            "parallel"
        )


def check_prompts(*prompts: object) -> None:
    """Raises :class:`AutoparError` for prompts that are not a tensor of token ids."""
    for given in prompts:
        if given is not None and not isinstance(given, torch.Tensor):
            raise AutoparError(
                f"the prompts of generate() are a {type(given).__name__}: give a tensor of token ids, [rows, tokens], "
                "such as torch.tensor([[1, 2]])"
            )


def one_token(model: nn.Module, rows: int, cache: Any, mask: torch.Tensor | None = None) -> dict[str, Any]:
    """The keyword inputs with which ``generate`` calls ``model`` for one token of each of ``rows`` sequences. ``mask``:
    which tokens of the prompts are not padding, [rows, length]."""
    accepted = inspect.signature(type(model).forward).parameters
    given: dict[str, Any] = {"use_cache": True, cache_name(model): cache}
    if "position_ids" in accepted:
        given["position_ids"] = torch.zeros(rows, 1, dtype=torch.int64)
    if "logits_to_keep" in accepted:
        given["logits_to_keep"] = 1
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    inputs: Mapping[str, Any] = model.prepare_inputs_for_generation(  # type: ignore[operator]
        ids, next_sequence_length=1, attention_mask=mask, **given
    )
    return {**inputs, "return_dict": True}
