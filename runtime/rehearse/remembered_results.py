"""Operations on meta tensors, run once for all calls that are alike.

What an operation returns on meta tensors follows from its arguments, of tensors from their shapes, strides and dtypes.
torch computes it in Python, which takes most of a rehearsal, and layers call the same operations again and again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.torch_internals.operators import OpOverload, schema_of
from autopar.torch_internals.tensors import storage_key

META = torch.device("meta")


@dataclass(frozen=True)
class _Meta:
    """What a tensor without data has."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> _Meta:
        return _Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


class _Other(Exception):
    """A call has an argument of which it is not known what its result depends on."""


class RememberedResults:
    """The results of the calls of one rehearsal: what some operations return depends on settings that hold for it.

    Calls that write to arguments, return memory of one, or have other tensors than meta ones, are always run."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[type, tuple[_Meta | None, ...]] | None] = {}

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the call, in memory of its own if it returns any."""
        try:
            key = function, _key(args), _key(tuple(kwargs.items()))
        except _Other:
            return function(*args, **kwargs)
        if key in self._known:
            known = self._known[key]
            return function(*args, **kwargs) if known is None else _made(*known)
        result = function(*args, **kwargs)
        self._known[key] = _described(function, args, result)
        return result


def _key(arg: Any) -> Hashable:
    """What the result of a call depends on of an argument. Raises :class:`_Other`."""
    if isinstance(arg, (tuple, list)):
        return tuple(map(_key, arg))
    if isinstance(arg, torch.Tensor):
        if type(arg) is not torch.Tensor or arg.device.type != "meta":
            raise _Other
        return tuple(arg.shape), arg.stride(), arg.storage_offset(), arg.dtype
    if arg is None or isinstance(arg, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return arg
    if isinstance(arg, (bool, int, float)):
        return type(arg), arg  # 1, 1.0 and True are equal.
    raise _Other


def _described(function: Any, args: Sequence[Any], result: Any) -> tuple[type, tuple[_Meta | None, ...]] | None:
    """What is needed to make ``result`` again; None if it has to be computed."""
    if not isinstance(function, OpOverload) or any(a.alias_info is not None for a in schema_of(function).arguments):
        return None
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if type(result) not in (tuple, list, torch.Tensor) or not all(p is None or _is_plain(p) for p in parts):
        return None
    made = [part.untyped_storage() for part in parts if part is not None]
    own = {storage_key(storage) for storage in made}
    given = {storage_key(t.untyped_storage()) for t in args if isinstance(t, torch.Tensor)}
    if len(own) < len(made) or own & given:
        return None
    return type(result), tuple(None if part is None else _Meta.of(part) for part in parts)


def _is_plain(part: Any) -> bool:
    """Whether a result is a meta tensor that takes all of its memory."""
    if type(part) is not torch.Tensor or part.device.type != "meta":
        return False
    return part.untyped_storage().nbytes() == _Meta.of(part).make().untyped_storage().nbytes()


def _made(kind: type, parts: Sequence[_Meta | None]) -> Any:
    tensors = [None if part is None else part.make() for part in parts]
    return tensors[0] if kind is torch.Tensor else kind(tensors)
