"""What transformers calls a cache, which changed in 5.24."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.torch_internals.hugging_face import cache_among, cache_name


class Newer(nn.Module):
    def forward(self, input_ids: torch.Tensor, cache: Any = None, **others: Any) -> Any:
        raise NotImplementedError


class Older(nn.Module):
    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **others: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("kind", "name"), [(Newer, "cache"), (Older, "past_key_values")])
def test_a_model_says_what_it_calls_its_cache(kind: type[nn.Module], name: str) -> None:
    assert cache_name(kind()) == name


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_found_under_either_name(name: str) -> None:
    cache = transformers.StaticCache(config=transformers.LlamaConfig(num_hidden_layers=1), max_cache_len=4)
    assert cache_among({"input_ids": 1, name: cache}) == (cache, {"input_ids": 1})


def test_what_is_no_cache_of_transformers_is_an_argument_like_others() -> None:
    given = {"cache": torch.ones(2), "past_key_values": None}
    assert cache_among(given) == (None, given)
