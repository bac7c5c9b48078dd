"""Checks that the fields of a plan, and their parts, have the types they are declared with.

A plan may come from a file that somebody edited, so the declared types are checked at run time.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.ir.placements import OWN_KINDS

from .fitting_types import MOST, UNBOUNDED, fitting, hints

# What kinds of values are called in JSON.
_CALLED: dict[type, str] = {str: "a text", bool: "true or false"}


def wrong_types(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Yields, for each part of ``value`` that is not of the declared type ``kind``, where it is and what is wrong."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin is typing.Literal:
        if not isinstance(value, str) or value not in arguments:
            one_of = "one of " * (len(arguments) > 1)
            yield f"{where} is {value!r}, not {one_of}{', '.join(map(str, arguments))}"
    elif origin in (typing.Union, types.UnionType):
        yield from _of_union(value, arguments, where)
    elif origin is tuple:
        yield from _of_tuple(value, arguments, where)
    elif origin is collections.abc.Mapping:
        yield from _of_mapping(value, arguments, where)
    elif dataclasses.is_dataclass(kind) and kind not in OWN_KINDS:
        yield from wrong_fields(value, kind, where)
    else:
        yield from _of_plain(value, kind, where)


def wrong_fields(value: Any, kind: Any, where: str) -> Iterator[str]:
    """:func:`wrong_types` for each field of a dataclass."""
    if not isinstance(value, kind):
        yield f"{where} is {value!r}, not a {kind.__name__}"
        return
    for name, hint in hints(kind).items():
        item = getattr(value, name)
        if not fitting(hint, name in UNBOUNDED)(item):
            yield from wrong_types(item, hint, f"{where}.{name}" if where else name)


def _of_union(value: Any, kinds: tuple[Any, ...], where: str) -> Iterator[str]:
    if isinstance(value, (TorchPlacement, *OWN_KINDS)):
        return
    if value is None and type(None) in kinds:
        return
    real = [kind for kind in kinds if kind is not type(None)]
    problems = [list(wrong_types(value, kind, where)) for kind in real]
    if all(problems):
        begin = f"{where} is {value!r}, not "
        alone = [own[0].removeprefix(begin) for own in problems if len(own) == 1 and own[0].startswith(begin)]
        yield from [begin + " or ".join(alone)] if len(alone) == len(real) else problems[0]


def _of_tuple(value: Any, kinds: tuple[Any, ...], where: str) -> Iterator[str]:
    if not isinstance(value, tuple):
        yield f"{where} is {value!r}, not a list"
    elif len(kinds) == 2 and kinds[1] is Ellipsis:
        for position, item in enumerate(value):
            yield from wrong_types(item, kinds[0], f"{where}[{position}]")
    elif len(value) != len(kinds):
        yield f"{where} has {len(value)} entries, not {len(kinds)}"
    else:
        for position, (item, kind) in enumerate(zip(value, kinds, strict=True)):
            yield from wrong_types(item, kind, f"{where}[{position}]")


def _of_mapping(value: Any, kinds: tuple[Any, ...], where: str) -> Iterator[str]:
    if not isinstance(value, collections.abc.Mapping):
        yield f"{where} is {value!r}, not a table"
        return
    for key, item in value.items():
        yield from wrong_types(key, kinds[0], f"a name in {where}")
        yield from wrong_types(item, kinds[1], f"{where}[{key!r}]" if isinstance(key, str) else where)


def _of_plain(value: Any, kind: Any, where: str) -> Iterator[str]:
    name = where.rpartition(".")[2]
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            yield f"{where} is {value!r}, not a number"
        elif math.isnan(value) or (not abs(value) < MOST and not (math.isinf(value) and name in UNBOUNDED)):
            yield f"{where} is {value!r}, not a finite number"
    elif kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{where} is {value!r}, not a whole number"
        elif abs(value) >= 1 << 62:
            yield f"{where} is {value!r}, too large a number"
    elif isinstance(kind, type) and not isinstance(value, kind):
        yield f"{where} is {value!r}, not {_CALLED.get(kind, kind.__name__)}"
