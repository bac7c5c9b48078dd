"""``generate`` under plans: the tokens of one process, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from autopar.runtime.generation.one_token import check_prompts
from tests.helpers.generating import check
from tests.helpers.marks import slow_rows_but

GREEDY: dict[str, Any] = {"max_new_tokens": 12}
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 50}
_HEADS = {f"*.{name}_proj": "S(1)" for name in ("q", "k", "v")}
TENSOR = {"pins": {**_HEADS, "*o_proj.weight": "S(1)", "*down_proj.weight": "S(1)"}, "mesh_search": False}
TENSOR_GPT2 = {"pins": {"*attn.c_proj.weight": "S(0)", "*wte.weight": "S(0)"}, "mesh_search": False}
PIPELINE = {"stages": 2, "microbatches": 2}
BOTH = {"stages": 2, "microbatches": 2, "pins": {**_HEADS, "*o_proj.weight": "S(1)"}}
ROWS = {"pins": {"model.embed_tokens": "S(0)"}, "mesh_search": False}


@pytest.mark.parametrize(
    "name, mesh, options",
    slow_rows_but(
        [0],
        [
            ("llama", (2,), TENSOR),
            ("llama", (2,), PIPELINE),
            ("llama", (4,), BOTH),
            ("gpt2", (2,), TENSOR_GPT2),
            ("gpt2", (2,), PIPELINE),
            ("qwen2", (4,), {**TENSOR, "pins": {"*o_proj.weight": "S(1)"}}),
            ("qwen2", (2,), PIPELINE),
            ("mixtral", (2,), {"pins": {"*o_proj.weight": "S(1)"}, "mesh_search": False}),
            ("mistral", (2,), TENSOR),
            ("mistral", (2,), PIPELINE),
            ("llama", (2,), {**ROWS, "dtype": torch.bfloat16}),
            ("llama", (2,), {**PIPELINE, "dtype": torch.bfloat16}),
            ("llama", (2, 2), {}),
            ("llama", (3,), {"stages": (1, 2), "microbatches": 2}),
            ("gpt2", (4,), {"stages": (3, 1), "microbatches": 4}),
        ],
    ),
)
def test_tokens_are_those_of_one_process(name: str, mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    _, programs = check(name, mesh, dict(options), [GREEDY, SAMPLED, GREEDY])
    assert programs == 2  # A prompt, and one token.


def test_the_cache_is_sharded_and_whatever_is_longer_makes_programs_of_its_own() -> None:
    plan, programs = check("llama", (2,), {**TENSOR, "cache_length": 40}, [GREEDY, {"max_new_tokens": 20}, GREEDY])
    assert programs == 2
    # Two layers' keys and values, 4 x 2 x 40 x 16 numbers each, half on each device; and 145 bytes of other inputs.
    assert "inputs 40." in plan


@pytest.mark.parametrize("prompts", [[[1, 2]], "hello"])
def test_prompts_that_are_no_tensor(prompts: object) -> None:
    with pytest.raises(AutoparError, match=r"give a tensor of token ids, \[rows, tokens\]"):
        check_prompts(prompts)
