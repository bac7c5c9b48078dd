"""Computing in another floating-point width: values of it, and what models compute that insist on one.

A model may ask for float32 by name (``x.float()``, ``dtype=torch.float32``), so that converting its parameters makes it
mix widths, which many operations refuse. Such a model computes in the other width where every request for a width is
answered with that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.torch_internals.trees import tree_map

_WIDER = {
    **dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_METHODS = {
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.cfloat: torch.complex64,  # type: ignore[attr-defined]
    torch.Tensor.cdouble: torch.complex128,  # type: ignore[attr-defined]
}
"""Methods that convert, and to what."""


def in_width(dtype: torch.dtype, double: bool = True) -> torch.dtype:
    """What replaces ``dtype`` in float64, or if not ``double`` in float32: of complex numbers, the width of a part."""
    return (_WIDER if double else _NARROWER).get(dtype, dtype)


def converted(value: Any, double: bool = True) -> Any:
    """``value`` in that width if it is a tensor, as :func:`in_width`."""
    return value.to(in_width(value.dtype, double)) if isinstance(value, torch.Tensor) else value


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within, new tensors have ``dtype`` unless they are asked for another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def insisting(double: bool = True) -> Iterator[None]:
    """Within, models that insist on another width compute in float64, or if not ``double`` in float32. Forward: of
    backward a mode sees the call alone, and no requests of what that runs (a recomputed layer)."""
    with default_dtype(torch.float64 if double else torch.float32), _Requests(double):
        yield


class _Requests(TorchFunctionMode):
    """Answers every request for a width with one."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.double = double

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            return args[0].to(in_width(_METHODS[func], self.double), **(kwargs or {}))
        args, kwargs = tree_map(self._answered, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def _answered(self, leaf: Any) -> Any:
        return in_width(leaf, self.double) if isinstance(leaf, torch.dtype) else leaf
