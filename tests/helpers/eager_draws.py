"""An eager model that draws what a parallel one draws: what dropout under any plan is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops.random import DRAWS
from autopar.trace.decompositions.random import RANDOM
from autopar.trace.patches import patched

STATE = torch.tensor([7, 0, 3, 0])


class _Numbered(TorchDispatchMode):
    """Numbers draws in the order of their calls, as the trace does."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self.state, self.places = state, itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.autopar.random_state.default:
            return self.state
        if func in DRAWS.values():
            return func(*args, **kwargs, place=next(self.places))
        return func(*args, **kwargs)


class _Replaced(TorchDispatchMode):
    """Runs the decompositions of random operations in place of the operations."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self.numbered = _Numbered(state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RANDOM:
            with self.numbered:
                return RANDOM[func](*args, **(kwargs or {}))
        if func is aten.rrelu_with_noise.default:
            with self.numbered:
                result, noise = RANDOM[aten.rrelu_with_noise_functional.default](*args)
            args[1].copy_(noise)
            return result
        functional = _FUNCTIONAL.get(func)
        if functional in RANDOM:
            with self.numbered:
                return args[0].copy_(RANDOM[functional](*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


aten = torch.ops.aten
_FUNCTIONAL = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.cauchy_.default: aten.cauchy.default,
    aten.geometric_.default: aten.geometric.default,
    aten.log_normal_.default: aten.log_normal.default,
    aten.random_.default: aten.random.default,
    aten.random_.to: aten.random.to,
    getattr(aten.random_, "from"): getattr(aten.random, "from"),
    aten.normal_.default: aten.normal_functional.default,
    aten.uniform_.default: aten.uniform.default,
    aten.exponential_.default: aten.exponential.default,
}


@contextmanager
def eager_draws(state: torch.Tensor = STATE) -> Iterator[None]:
    """Within, a model whose batch is in front draws as under autopar in the given state. Two copies of a model must
    not share a block: draws are numbered from its start."""
    with patched(), _Replaced(state):
        yield
