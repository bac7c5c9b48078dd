"""Reads entries of a plan's file, which somebody may have edited: what is wrong is named by where it stands.

Converters (:func:`text`, :func:`count`, ...) raise :class:`OptionsError` that says what a value is not. What reads
several entries adds where they stand, and in place of Python's errors, what should stand there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autopar.errors import AutoparError, OptionsError
from autopar.ir.module_paths import did_you_mean

Read = TypeVar("Read")
# What reading raises for entries of another form.
WRONG = (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError)
# Characters of a wrong entry that a message repeats. Chosen: enough to find it by.
_SHOWN = 80
_NOT_FINITE = ("inf", "-inf", "nan")


def entry(data: Mapping[str, Any], name: str) -> Any:
    """``data[name]``."""
    if name not in data:
        raise OptionsError(f"{name!r} is missing")
    return data[name]


def one(where: str, value: Any, form: str, read: Callable[[Any], Read]) -> Read:
    """``read(value)`` of the entry at ``where``, which should be ``form``."""
    try:
        return read(value)
    except (*WRONG, AutoparError) as error:
        raise _wrong(where, value, form, error) from error


def table(where: str, value: Any, form: str, read: Callable[[Any], Read]) -> dict[str, Read]:
    """The entries of a table, each of which should be ``form``, by name."""
    if not isinstance(value, Mapping):
        raise OptionsError(f"{where} is {shown(value)}, not a table")
    found, name = {}, ""
    try:
        for name, item in value.items():
            found[name] = read(item)
    except (*WRONG, AutoparError) as error:
        raise _wrong(f"{where}[{name!r}]", value[name], form, error) from error
    return found


def rows(where: str, value: Any, form: str, read: Callable[[Any], Read]) -> tuple[Read, ...]:
    """The entries of a list, each of which should be ``form``."""
    if not isinstance(value, (list, tuple)):
        raise OptionsError(f"{where} is {shown(value)}, not a list")
    found: list[Read] = []
    try:
        for item in value:
            found.append(read(item))
    except (*WRONG, AutoparError) as error:
        raise _wrong(f"{where}[{len(found)}]", value[len(found)], form, error) from error
    return tuple(found)


def record(where: str, value: Any, kind: type[Read]) -> Read:
    """The dataclass ``kind`` with the fields that a table at ``where`` names ("" within another entry). What these are
    is checked with the whole plan."""
    if not isinstance(value, Mapping):
        raise OptionsError(f"{where or 'it'} is {shown(value)}, not a table")
    inside = f"{where}." if where else ""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise OptionsError(f"{inside}{unknown[0]} is not known{did_you_mean(unknown[0], list(fields))}")
    lacking = [name for name, field in fields.items() if name not in value and field.default is dataclasses.MISSING]
    if lacking:
        raise OptionsError(f"{inside}{lacking[0]} is missing")
    return kind(**value)


def text(value: object) -> str:
    if not isinstance(value, str):
        raise OptionsError(f"{shown(value)} is not a text")
    return value


def whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionsError(f"{shown(value)} is not a whole number")
    return value


def count(value: object) -> int:
    found = whole(value)
    if found < 0:
        raise OptionsError(f"{found} is below 0")
    return found


def number(value: object) -> float:
    """A number; one that is not finite is written as text."""
    if isinstance(value, bool) or (not isinstance(value, (int, float)) and value not in _NOT_FINITE):
        raise OptionsError(f"{shown(value)} is not a number")
    return float(value)


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionsError(f"{shown(value)} is neither true nor false")
    return value


def texts(where: str, value: Any) -> tuple[str, ...]:
    return rows(where, value, "a text", text)


def counts(where: str, value: Any) -> tuple[int, ...]:
    return rows(where, value, "a count", count)


def shown(value: object) -> str:
    """What stands there, as JSON, cut off where it is long."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        written = repr(value)
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]} ..."


def _wrong(where: str, value: Any, form: str, error: Exception) -> OptionsError:
    if isinstance(error, AutoparError):
        return OptionsError(f"{where}: {error}")
    return OptionsError(f"{where} is {shown(value)}, not {form}")
