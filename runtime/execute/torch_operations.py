"""Operations of torch by the names that programs have for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import GraphError
from autopar.runtime.torch_internals.functions import FUNCTIONS
from autopar.torch_internals.operators import OpOverload, schema_of

Operation = Callable[..., Any]

# A view of the traced tensor may be impossible for a shard's memory layout, so reshapes, which may copy, replace views.
_TOLERANT = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}


def function_of(operation: Operation) -> Operation:
    """The fastest way to call ``operation``."""
    return FUNCTIONS.get(str(operation), operation) if isinstance(operation, OpOverload) else operation


def resolve_aten(op: str) -> OpOverload:
    """The torch operation called ``namespace.name.overload``. Raises :class:`GraphError` if there is none."""
    parts = _TOLERANT.get(op, op).split(".")
    operation: Any = torch.ops
    try:
        for part in parts:
            operation = getattr(operation, part)
    except AttributeError:
        operation = None
    if not isinstance(operation, OpOverload):
        raise GraphError(f"{op!r} is not an operation: expected namespace.name.overload, such as aten.mm.default")
    return operation


def returns_sequence(operation: Operation) -> bool:
    """Whether a torch operation returns a tuple or list even if it has one result."""
    if not isinstance(operation, OpOverload):
        return False
    returns = schema_of(operation).returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)
