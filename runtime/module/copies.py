"""Copies of a parallel module, for averages of weights (EMA).

A copy has its own parameters, placed like those of its source: at once, or when the source's first batch places them.
Its programs are compiled from its own modules under the source's plan, so that changes of the copy take effect there.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.compiled import Compile
from autopar.runtime.torch_internals.dtensors import dtensor_like, local_tensor


def copied_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of ``module``, with copies of its DTensor parameters in the same placements. With pipeline stages
    some parameters are empty on this rank, which torch would not copy."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            local = local_tensor(parameter).detach().clone()
            copied = nn.Parameter(dtensor_like(local, parameter), parameter.requires_grad)
            copied.__dict__.update(parameter.__dict__)
            memo[id(parameter)] = copied
    return copy.deepcopy(module, memo)


def compile_for(compile: Compile, module: nn.Module) -> Compile:
    """The compiler for ``module``, a copy of the module that ``compile`` compiles for: ``compile.copied_for(module)``,
    or ``compile`` itself if it has no such method and so does not depend on the module."""
    copied_for = getattr(compile, "copied_for", None)
    own: Compile = compile if copied_for is None else copied_for(module)
    return own
