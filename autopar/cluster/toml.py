"""Reads and writes clusters as TOML. Errors name the key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from autopar.errors import OptionsError

from .device import Device
from .groups import Group
from .links import Link, Rate, require

_T = TypeVar("_T")


def table_of(value: Any) -> Any:
    """Dataclasses, mappings and tuples as TOML tables and arrays. Values that are None or empty are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        values = {item.name: getattr(value, item.name) for item in fields(value)}
        omits_defaults = isinstance(value, Rate)
        defaults = {item.name: item.default for item in fields(value) if omits_defaults or item.default == math.inf}
        if values.get("groups"):  # The device of groups follows from them.
            del values["device"]
        return {
            k: table_of(v) for k, v in values.items() if v is not None and v not in ({}, ()) and v != defaults.get(k)
        }
    if isinstance(value, Mapping):
        return {str(k): table_of(v) for k, v in value.items()}
    return [table_of(item) for item in value] if isinstance(value, tuple) else value


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def dump(table: dict[str, Any], path: str = "") -> str:
    """``table`` as TOML: plain values first, then tables, then arrays of tables."""
    tables = {k: v for k, v in table.items() if isinstance(v, dict)}
    arrays = {k: v for k, v in table.items() if k in ("links", "groups")}
    text = "".join(f"{_key(k)} = {_inline(v)}\n" for k, v in table.items() if k not in tables and k not in arrays)
    for name, inner in tables.items():
        text += f"\n[{path}{_key(name)}]\n" + dump(inner, f"{path}{_key(name)}.")
    for name, items in arrays.items():
        text += "".join(f"\n[[{path}{name}]]\n" + dump(item, f"{path}{name}.") for item in items)
    return text


def _number(value: Any, where: str) -> float:
    require(isinstance(value, (int, float)) and not isinstance(value, bool), f"{where} is {value!r}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise OptionsError(f"{where} is a number of {len(str(value))} digits, too large to compute with") from None


def _whole(value: Any, where: str) -> int:
    require(isinstance(value, int) and not isinstance(value, bool), f"{where} is {value!r}, not a whole number")
    return int(value)


def _truth(value: Any, where: str) -> bool:
    require(isinstance(value, bool), f"{where} is {value!r}, not true or false")
    return bool(value)


def _text(value: Any, where: str) -> str:
    require(isinstance(value, str), f"{where} is {value!r}, not a string")
    return str(value)


def _numbers(value: Any, where: str) -> dict[str, float]:
    require(isinstance(value, dict), f"{where} is {value!r}, not a table of numbers")
    return {str(k): _number(v, f"{where}.{k}") for k, v in value.items()}


def _array(value: Any, where: str, of: str) -> list[Any]:
    require(isinstance(value, list), f"{where} is {value!r}, not an array of {of}")
    return list(value)


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    return tuple(_whole(item, where) for item in _array(value, where, "whole numbers"))


def _words(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_text(item, where) for item in _array(value, where, "words"))


def _read_rates(value: Any, where: str) -> dict[str, tuple[Rate, ...]]:
    require(isinstance(value, dict), f"{where} is {value!r}, not a table of collectives")
    lines = {k: v if isinstance(v, list) else [v] for k, v in value.items()}
    return {k: tuple(read(Rate, rate, f"{where}.{k}") for rate in rates) for k, rates in lines.items()}


def _read_links(value: Any, where: str) -> tuple[Link, ...]:
    require(isinstance(value, list), f"{where} is not an array of tables; write [[links]], innermost first")
    tables = [{"size": None, **link} if isinstance(link, dict) else link for link in value]
    return tuple(read(Link, table, f"{where}[{index}]") for index, table in enumerate(tables))


def _read_groups(value: Any, where: str) -> tuple[Group, ...]:
    require(isinstance(value, list), f"{where} is not an array of tables; write [[groups]], the first ranks first")
    return tuple(read(Group, table, f"{where}[{index}]") for index, table in enumerate(value))


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("name", "source", "algorithm", "backend"), _text),
    **dict.fromkeys(
        (
            "memory_bytes",
            "reserve_bytes",
            "host_memory_bytes",
            "nvme_bytes",
            "processors",
            "adapters",
            "sharing",
            "count",
        ),
        _whole,
    ),
    **dict.fromkeys(("peak_flops", "measurement", "dtype_efficiency"), _numbers),
    "overlaps": _truth,
    "torus": _sizes,
    "algorithms": _words,
    "size": lambda value, where: value if value is None else _whole(value, where),
    "rates": _read_rates,
    "links": _read_links,
    "groups": _read_groups,
    "device": lambda value, where: read(Device, value, where),
}


def read(cls: type[_T], table: Any, where: str) -> _T:
    """Reads an instance of the dataclass ``cls`` from a TOML table. Errors name the key."""
    require(isinstance(table, dict), f"{where} is {table!r}, not a table")
    by_name = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(by_name))
    require(not unknown, f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(by_name)}")
    optional = {name for name, item in by_name.items() if (item.default, item.default_factory) != (MISSING, MISSING)}
    missing = [name for name in by_name if name not in table and name not in optional]
    require(not missing, f"{where} lacks {', '.join(missing)}")
    return cls(**{name: _READERS.get(name, _number)(value, f"{where}: {name}") for name, value in table.items()})
