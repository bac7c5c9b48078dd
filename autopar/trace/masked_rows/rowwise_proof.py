"""Proves that a function of selected rows treats each row by itself, by running it on meta tensors.

The rows are a dim of ``ROWS`` rows, one on each of as many devices: the function may run on all rows of a tensor, the
selected ones and the others, exactly if its operations can run on devices that do not communicate, which is what the
sharding rules say (``passes/rules/``, each proven by execution). Strategies that need another local form (an offset, a
mask by position), or leave a partial sum, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir.node import TensorType
from autopar.ir.placements import REPLICATE, AxisStrategy, Placement, is_shard, shard, shard_dim
from autopar.passes.rule_language.registry import OpCall, Operand
from autopar.passes.rules import RULES
from autopar.torch_internals.fake_tensors import hint_of
from autopar.torch_internals.modes import TorchDispatchMode, without_dispatch_modes
from autopar.torch_internals.operators import is_mutable, schema_of
from autopar.torch_internals.trees import tree_flatten, tree_leaves

from .branches import SelectionError

# Candidates for the number of rows, which must not equal any other size.
# Chosen: primes, which sizes of models seldom are.
_ROWS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103)
# Operations with finite results and finite derivatives for finite operands, so that rows of zeros are harmless.
_TAME = {
    "t", "mm", "addmm", "bmm", "baddbmm", "view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze",
    "squeeze", "expand", "select", "slice", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack", "clone",
    "_to_copy", "detach", "alias", "add", "sub", "rsub", "mul", "neg", "relu", "gelu", "silu", "sigmoid", "tanh",
    "softplus", "elu", "leaky_relu", "hardswish", "hardsigmoid", "clamp", "clamp_min", "clamp_max", "_softmax",
    "_log_softmax", "native_layer_norm", "native_dropout", "native_group_norm", "sum", "mean", "embedding", "index",
    "linear", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bernoulli", "convolution",
}  # fmt: skip


@dataclass
class RowwiseResult:
    """``dims``: for each tensor of the result, the dim of its rows (None: it has none). ``views``: whether a result
    shares memory with an operand; ``written``: operands changed in place; ``tame``: see :data:`_TAME`."""

    dims: list[int | None] = field(default_factory=list)
    views: bool = False
    written: tuple[int, ...] = ()
    tame: bool = True


class _Watch(TorchDispatchMode):
    def __init__(self, rows: int, placed: Sequence[tuple[Tensor, int]], operands: Sequence[Tensor]) -> None:
        super().__init__()
        self._rows = rows
        self._alive: list[Any] = [*operands]
        self.placed: dict[int, Placement] = {id(tensor): shard(dim) for tensor, dim in placed}
        self._operands = {id(tensor): index for index, tensor in enumerate(operands)}
        self.result = RowwiseResult()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = result if isinstance(result, (tuple, list)) else (result,)
        self._alive += [*operands, *results]
        if not any(id(operand) in self.placed for operand in operands):
            if is_mutable(func):
                raise SelectionError(f"{func} changes a tensor that is not selected by rows")
            return result
        places = tuple(self.placed.get(id(operand), REPLICATE) for operand in operands)
        name = schema_of(func).name.removeprefix("aten::")
        self.result.tame &= name.removesuffix("_") in _TAME
        self._note_writes(func, args, kwargs)
        outputs = self._outputs(func, args, kwargs, operands, places, results)
        for tensor, place in zip(results, outputs, strict=True):
            if isinstance(tensor, Tensor):
                self.placed[id(tensor)] = place
        return result

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            info = argument.alias_info
            if info is not None and isinstance(value, Tensor):
                if info.is_write:
                    if id(value) not in self._operands or id(value) not in self.placed:
                        raise SelectionError(
                            f"{func} writes to a part of the selected rows in place; write out of place"
                        )
                    self.result.written += (self._operands[id(value)],)
                else:
                    self.result.views = True
        if any(isinstance(v, Tensor) and a.alias_info for a in schema_of(func).arguments for v in [kwargs.get(a.name)]):
            raise SelectionError(f"{func} writes to a tensor given as out")

    def _outputs(
        self, func: Any, args: Any, kwargs: Any, operands: list[Tensor], places: tuple[Placement, ...], results: Any
    ) -> Sequence[Placement]:
        if torch.Tag.nondeterministic_seeded in func.tags:
            if all(isinstance(r, Tensor) and r.shape == operands[0].shape for r in results):
                return [places[0]] * len(results)  # Draws are elementwise.
        elif not schema_of(func).name.startswith(("aten::new_", "aten::tri")):
            call = self._call(func, args, kwargs, operands, results)
            offered: list[AxisStrategy] = list(RULES[call.op](call)) if call.op in RULES else []
            fitting = [s for s in offered if s.inputs == places and _is_by_rows(s)]
            alike = [s for s in fitting if set(s.outputs) <= set(places)]
            if fitting:
                outputs: Sequence[Placement] = (alike or fitting)[0].outputs
                return outputs
        raise SelectionError(
            f"{func} does not treat each of the selected rows by itself, so its result depends on how many and which "
            "there are; do it on the whole tensor with a mask (torch.where, or weights that are zero where a row is "
            "not selected), or before selecting"
        )

    def _call(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor], results: Any) -> OpCall:
        position = iter(range(len(operands)))

        def leaf(arg: Any) -> Any:
            if isinstance(arg, Tensor):
                return Operand(next(position))
            return tuple(map(leaf, arg)) if isinstance(arg, (tuple, list)) else arg

        positional = tuple(map(leaf, args))
        named = tuple((key, leaf(arg)) for key, arg in kwargs.items())
        types = tuple(map(_type, operands))
        outputs = tuple(_type(r) if isinstance(r, Tensor) else None for r in results)
        return OpCall(
            op=_functional(func), inputs=types, outputs=outputs, args=positional, kwargs=named, size=self._rows
        )


def _is_by_rows(strategy: AxisStrategy) -> bool:
    return not strategy.local and all(map(is_shard, strategy.outputs))


def _type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _functional(func: Any) -> str:
    """``aten.mul.Tensor`` of ``aten.mul_.Tensor``."""
    if not is_mutable(func):
        return str(func)
    name, _, overload = str(func).rpartition(".")
    return f"{name.removesuffix('_')}.{overload}"


def rows_of(tensors: Sequence[Tensor]) -> int:
    """A number of rows that divides no size of the tensors."""
    sizes = {hint(size) for tensor in tensors for size in tensor.shape}
    return next(count for count in _ROWS if all(size % count for size in sizes if size))


def hint(size: Any) -> int:
    """The number that a size, which may be a symbol, compares like."""
    return int(size) if type(size) is int else hint_of(size)


def by_rows(func: Any, args: Any, kwargs: Any, operands: dict[int, int], rows: int) -> RowwiseResult:
    """Runs ``func`` on meta tensors, where ``operands[id]`` is the dim of an operand's rows. Raises
    :class:`SelectionError` if it does not treat rows one by one."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    placed = [(tensor, operands[id(tensor)]) for tensor in tensors if id(tensor) in operands]
    watch = _Watch(rows, placed, tensors)
    try:
        with torch.no_grad(), watch:
            result = func(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise SelectionError(
            f"{getattr(func, '__name__', func)} was called on rows selected by values, whose number is not known, in "
            f"a way that autopar does not support ({error})"
        ) from error
    for tensor in tree_flatten(result)[0]:
        if isinstance(tensor, Tensor):
            place = watch.placed.get(id(tensor), REPLICATE)
            dim = shard_dim(place)
            if dim is not None and (place != shard(dim) or tensor.shape[dim] != rows):
                raise SelectionError("the selected rows are mixed with another dim here; keep them a dim of their own")
            watch.result.dims.append(dim)
    return watch.result


without_modes = without_dispatch_modes
