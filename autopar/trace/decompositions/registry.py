"""Tables of decompositions that apply while a model is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_internals.operators import OpOverload

aten: Any = torch.ops.aten

Decomposition = Callable[..., Any]
Table = dict[OpOverload, Decomposition]


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels accumulate."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def into(table: Table) -> Callable[..., Callable[[Decomposition], Decomposition]]:
    """A decorator that takes operations, and registers a function of their arguments as their decomposition."""

    def entered_for(*ops: OpOverload) -> Callable[[Decomposition], Decomposition]:
        def enter(function: Decomposition) -> Decomposition:
            table.update(dict.fromkeys(ops, function))
            return function

        return enter

    return entered_for
