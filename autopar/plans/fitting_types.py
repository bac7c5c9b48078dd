"""Tells quickly whether a value has a declared type: what :mod:`.field_types` asks before it looks for what is wrong.

A plan of a large model has a million values, so each type becomes one function, made once, and an object that stands in
many places of a table is looked at once.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.ir.placements import OWN_KINDS

# Numbers that may be infinite: bounds that no solver proved, time without a limit, and links within a device.
UNBOUNDED = ("objective", "bound", "gap", "unawaited", "bandwidth")
# Chosen: a plan's sums of such numbers stay below the largest float (1.8e308).
MOST = 1e300
Fits = Callable[[Any], bool]


@cache
def fitting(kind: Any, is_unbounded: bool = False) -> Fits:
    """The function that tells whether a value is of the declared type ``kind``. ``is_unbounded``: a float may be
    infinite."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: True
    if origin is typing.Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin in (typing.Union, types.UnionType):
        return _one_of(tuple(fitting(each, is_unbounded) for each in arguments if each is not type(None)), arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is collections.abc.Mapping:
        return _mapping(arguments)
    if dataclasses.is_dataclass(kind) and kind not in OWN_KINDS:
        return _record(kind)
    return _plain(kind, is_unbounded)


@cache
def hints(kind: Any) -> dict[str, Any]:
    """The declared type of each field of a dataclass."""
    declared = typing.get_type_hints(kind)
    return {field.name: declared[field.name] for field in dataclasses.fields(kind)}


def _one_of(checks: tuple[Fits, ...], arguments: tuple[Any, ...]) -> Fits:
    kinds = (TorchPlacement, *OWN_KINDS, *(each for each in arguments if each is type(None)))
    return lambda value: isinstance(value, kinds) or any(check(value) for check in checks)


def _tuple(kinds: tuple[Any, ...]) -> Fits:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        all_fit = _all(kinds[0])
        return lambda value: isinstance(value, tuple) and all_fit(value)
    checks = tuple(map(fitting, kinds))
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def _mapping(kinds: tuple[Any, ...]) -> Fits:
    keys_fit, values_fit = _all(kinds[0]), _all(kinds[1])
    return lambda value: isinstance(value, collections.abc.Mapping) and keys_fit(value) and values_fit(value.values())


def _all(kind: Any) -> Callable[[Iterable[Any]], bool]:
    """Whether all items are of a type."""
    check = fitting(kind)
    if isinstance(kind, type) and not dataclasses.is_dataclass(kind):  # As quick as to tell which are the same.
        return lambda items: all(map(check, items))
    return lambda items: all(map(check, {id(item): item for item in items}.values()))


def _record(kind: Any) -> Fits:
    checks = tuple((name, fitting(hint, name in UNBOUNDED)) for name, hint in hints(kind).items())
    return lambda value: isinstance(value, kind) and all(check(getattr(value, name)) for name, check in checks)


def _plain(kind: Any, is_unbounded: bool) -> Fits:
    if kind is float:
        return _is_unbounded_number if is_unbounded else _is_number
    if kind is int:
        return _is_whole
    if isinstance(kind, type):
        return lambda value: isinstance(value, kind)
    return lambda value: True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST


def _is_unbounded_number(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, float) and math.isinf(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62
