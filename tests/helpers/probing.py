"""Calls as rules see them, made from real tensors, and strategies from text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.ir.node import Arg, TensorType, map_arg
from autopar.passes.probe.trials import find_operation
from autopar.passes.rule_language.registry import OpCall, Operand


def call_of(op: str, *args: Any, size: int = 2, **kwargs: Any) -> OpCall:
    """The call ``op(*args, **kwargs)``, its results typed by the operation's shape function."""
    operation = find_operation(op)
    assert operation is not None, op
    operands: list[torch.Tensor] = []

    def leaf(arg: Any) -> Arg:
        if not isinstance(arg, torch.Tensor):
            return arg
        operands.append(arg)
        return Operand(len(operands) - 1)

    seen = tuple(map_arg(arg, leaf) for arg in args)
    named = tuple((key, map_arg(arg, leaf)) for key, arg in kwargs.items())
    meta = [map_arg(arg, lambda a: a.to("meta") if isinstance(a, torch.Tensor) else a) for arg in args]
    found = operation(*meta, **kwargs)
    results = found if isinstance(found, (tuple, list)) else (found,)
    return OpCall(op, tuple(map(_type, operands)), tuple(map(_type, results)), seen, named, size)


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def texts(strategies: Iterable[object]) -> set[str]:
    """Strategies as text."""
    return set(map(str, strategies))
