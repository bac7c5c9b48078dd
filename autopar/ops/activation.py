"""Activations of blocks of experts as text: what a graph can contain of a function (:mod:`.experts`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """A function of a tensor [n, F] and its gradient, each as a list of ATen operations ``[op, args, kwargs]``.

    In arguments, ``{"value": i}`` is operand i or, for i past the operands, the result of an operation, with
    ``"item": j`` element j of a list of results; ``{"dtype": name}`` is a dtype, ``{"rows": true}`` is n and
    ``{"device": true}`` the device of the operands. The last operation gives the result. The operands are x, and for
    the gradient also that of the result. Text form: ``[forward, backward]`` in JSON.
    """

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Activation:
        forward, backward = json.loads(text)
        return Activation(tuple(forward), tuple(backward))

    def __call__(self, x: Tensor) -> Tensor:
        return _run(self.forward, x)

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of ``x``, given ``grad``, that of the result."""
        return _run(self.backward, x, grad)


def _run(steps: tuple[Any, ...], *operands: Tensor) -> Tensor:
    values: list[Any] = list(operands)
    for op, args, kwargs in steps:
        namespace, name, overload = op.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        arguments = [_fill(arg, values) for arg in args]
        values.append(function(*arguments, **{key: _fill(arg, values) for key, arg in kwargs.items()}))
    result: Tensor = values[-1]
    return result


def _fill(arg: Any, values: list[Any]) -> Any:
    if isinstance(arg, list):
        return [_fill(item, values) for item in arg]
    if not isinstance(arg, dict):
        return arg
    if "dtype" in arg:
        return getattr(torch, arg["dtype"])
    if "rows" in arg:
        return values[0].shape[0]
    if "device" in arg:
        return values[0].device
    value = values[arg["value"]]
    return value[arg["item"]] if "item" in arg else value
