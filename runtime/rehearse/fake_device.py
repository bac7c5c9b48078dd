"""Tensors of a device that is not there: a program rehearsed on fake tensors of CUDA, without a GPU or on a build of
torch that has none.

Fake tensors (``FakeTensorMode``) check devices and dtypes of every operation, and refuse to be read. A few methods of
tensors ask torch for a guard of the device before they dispatch, which fails where it is absent; here they are the
operations behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.runtime.execute.in_place import GRADIENTS
from autopar.runtime.execute.torch_operations import resolve_aten
from autopar.runtime.torch_internals.functions import FUNCTIONS
from autopar.torch_internals.fake_tensors import FakeTensorMode
from autopar.torch_internals.trees import tree_map

aten = torch.ops.aten


@contextmanager
def fake_device() -> Iterator[None]:
    """Within, tensors of any device can be made and computed with; none has data."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _Unguarded():
        yield


class _Unguarded(TorchFunctionMode):
    """Methods without their guards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _METHODS.get(func, func)(*args, **(kwargs or {}))


def _contiguous(x: torch.Tensor, **options: Any) -> torch.Tensor:
    whole = x.is_contiguous(**options)
    return x if whole else x.clone(memory_format=options.get("memory_format", torch.contiguous_format))


def _to(x: torch.Tensor, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    for arg in args:
        dtype = arg if isinstance(arg, torch.dtype) else dtype
        device = arg if isinstance(arg, (torch.device, str)) else device
        if isinstance(arg, torch.Tensor):
            dtype, device = arg.dtype, arg.device
    dtype, device = dtype or x.dtype, torch.device(device or x.device)
    if (dtype, device.type) == (x.dtype, x.device.type):
        return x
    moved: torch.Tensor = aten._to_copy.default(x, dtype=dtype, device=device)
    return moved


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    written: torch.Tensor = aten.copy_.default(x, source, non_blocking)
    return written


def _item(x: torch.Tensor, key: Any) -> torch.Tensor:
    """``x[key]`` for what the operations of autopar index with: integers, slices of step 1, ``...``, None, tensors."""
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(k is not None and k is not Ellipsis for k in keys)
    if Ellipsis in [k for k in keys if not isinstance(k, torch.Tensor)]:
        place = keys.index(Ellipsis)
        keys[place : place + 1] = [slice(None)] * (x.dim() - taken)
    if any(isinstance(k, torch.Tensor) for k in keys):
        return _gathered(x, keys)
    dim = 0
    for k in keys:
        if k is None:
            x = x.unsqueeze(dim)
        elif isinstance(k, slice):
            start, stop, _ = k.indices(x.shape[dim])
            x = x.narrow(dim, start, max(stop - start, 0))
        else:
            x = x.select(dim, int(k))
        dim += isinstance(k, slice) or k is None
    return x


def _gathered(x: torch.Tensor, keys: list[Any]) -> torch.Tensor:
    """Indexing with tensors, and whole slices between them."""
    picked: torch.Tensor = aten.index.Tensor(x, [k if isinstance(k, torch.Tensor) else None for k in keys])
    return picked


def _on_meta(operation: Any) -> Callable[..., Any]:
    """``operation``, which asks for a GPU to choose a kernel or a memory layout, by way of meta tensors. Operands of
    several devices or dtypes are errors, as in the kernels."""

    def run(*args: Any, **kwargs: Any) -> Any:
        operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
        device, kinds = operands[0].device, {(x.device, x.dtype) for x in operands}
        if len(kinds) > 1:
            raise RuntimeError(f"{operation} of operands of several devices or dtypes: {sorted(map(str, kinds))}")
        if device.type == "meta":
            return operation(*args, **kwargs)
        results = operation(*(_to(arg, "meta") if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)
        return tree_map(lambda x: torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x, results)

    return run


def _written(operation: Any) -> Callable[..., Any]:
    """The form of ``operation`` that writes into ``grad_input``, whose type has to be that of the result."""

    def run(*args: Any, grad_input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = operation(*args, **kwargs)
        if (result.shape, result.dtype, result.device) != (grad_input.shape, grad_input.dtype, grad_input.device):
            raise RuntimeError(f"{operation} does not fit where it is written to: {result} into {grad_input}")
        return grad_input

    return run


_METHODS: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.to: _to,
    torch.Tensor.copy_: _copy,
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.__getitem__: _item,
    **{
        operation: _on_meta(operation)
        for operation in (
            aten.convolution.default,
            aten.convolution_backward.default,
            aten._softmax.default,
            aten._log_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
            aten.im2col.default,
            aten.col2im.default,
        )
    },
    **{
        FUNCTIONS[str(operation)]: _on_meta(operation)
        for operation in (aten.convolution.default, aten._softmax.default, aten._log_softmax.default)
    },
    **{resolve_aten(into): _written(resolve_aten(plain)) for plain, into in GRADIENTS.items()},
}
