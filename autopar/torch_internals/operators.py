"""Operators as torch's dispatcher knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The tables of `torch.export` decompositions are public, but do not take a list of operators (2.11).
from torch._decomp import get_decompositions

# The classes of `torch.ops`: one overload, all overloads of a name, and operators that take functions (2.11).
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "aliased_argument",
    "autograd_kernel",
    "cpu_attention",
    "get_decompositions",
    "is_mutable",
    "operation_called",
    "overload_name",
    "registered_names",
    "safe_softmax",
    "schema_of",
    "set_autograd_kernel",
]


def operation_called(op: str) -> OpOverload | None:
    """The operation with a name such as ``aten.mm.default``, None if there is none. Relies on namespaces of
    ``torch.ops`` having packets, and these overloads, as attributes (2.11)."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace and name else None
    operation = getattr(packet, overload, None)
    return operation if isinstance(operation, OpOverload) else None


def schema_of(operation: OpOverload) -> torch._C.FunctionSchema:
    """Arguments and results of ``operation``. Relies on ``OpOverload._schema`` (2.11)."""
    return operation._schema


def aliased_argument(operation: OpOverload) -> int | None:
    """The position of the argument whose memory the first result has, or may have, without being written to; None if
    the schema names none. Relies on ``OpOverload._schema`` (2.11)."""
    returns = operation._schema.returns
    shared = returns[0].alias_info if returns else None
    if shared is None or shared.is_write:
        return None
    names = [None if a.alias_info is None else a.alias_info.before_set for a in operation._schema.arguments]
    return names.index(shared.before_set) if shared.before_set in names else None


def is_mutable(operation: OpOverload) -> bool:
    """Whether ``operation`` writes to an argument. Relies on ``OpOverload._schema`` (2.11)."""
    return operation._schema.is_mutable


def overload_name(operation: OpOverload) -> str:
    """``default``, ``Tensor``, ``out`` ... Relies on ``OpOverload._overloadname`` (2.11)."""
    return operation._overloadname


def registered_names() -> list[str]:
    """All operators of the process, as ``aten::add.Tensor``. Relies on ``torch._C._dispatch_get_all_op_names``
    (2.11)."""
    return torch._C._dispatch_get_all_op_names()


def autograd_kernel(operation: OpOverload) -> Callable[..., Any] | None:
    """The Python kernel that replaces autograd's, if any. Relies on ``OpOverload.py_kernels`` (2.11)."""
    return operation.py_kernels.get(torch._C.DispatchKey.Autograd)


def set_autograd_kernel(operation: OpOverload, kernel: Callable[..., Any] | None) -> None:
    """Sets the kernel of :func:`autograd_kernel`; None removes it. Relies on ``OpOverload.py_kernels`` and on
    ``_dispatch_cache``, which caches the choice (2.11)."""
    key = torch._C.DispatchKey.Autograd
    operation.py_kernels.pop(key, None)
    if kernel is not None:
        operation.py_kernels[key] = kernel
    operation._dispatch_cache.clear()


def safe_softmax(scores: Tensor, dim: int) -> Tensor:
    """Softmax that gives zeros for a row of ``-inf``, as attention does. Relies on ``torch._safe_softmax`` (2.11)."""
    return torch._safe_softmax(scores, dim)


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention by the processor's kernel, and the log-sum-exp of each row. Relies on
    ``_scaled_dot_product_flash_attention_for_cpu`` (2.11). In 2.11 its shape function declares sums of float64 as
    float32, which the kernel does not give."""
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, sums.double() if out.dtype == torch.float64 else sums
