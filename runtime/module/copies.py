"""Copies of a parallel module, as averages of weights (EMA) need them.

A copy has parameters of its own, placed as those of its source: now, or when the source's first batch places them. Its
programs are made from its own modules, so that what is changed in the copy counts there, under the source's plan.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.compiled import Compile
from autopar.runtime.torch_internals.dtensors import dtensor_like, local_tensor


def copied_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of ``module`` whose DTensor parameters are copies placed the same. Under pipeline stages there are
    some of which this rank holds nothing, which torch would not copy."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            local = local_tensor(parameter).detach().clone()
            made = nn.Parameter(dtensor_like(local, parameter), parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            memo[id(parameter)] = made
    return copy.deepcopy(module, memo)


def compile_for(compile: Compile, module: nn.Module) -> Compile:
    """What compiles for ``module``, a copy of the one that ``compile`` compiles for: its ``copied_for(module)``, or
    itself if it has none, since it does not look at the module then."""
    copied = getattr(compile, "copied_for", None)
    found: Compile = compile if copied is None else copied(module)
    return found
