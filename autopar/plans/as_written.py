"""Tells whether somebody changed in a plan's file what is not a choice.

How operations and parameters are placed may be edited: what follows from it is compared (:mod:`.validate`). What a plan
was made for, what it is predicted to take and what was proven of it is written once. A mesh, for one, follows from
nothing else in a plan under which every device has all of everything, and the seconds of a line from nothing but
prices. So a file has a digest of each field that is no choice, or of what in it is none.

A file of version 10 or later that lacks a digest is refused. Files of versions 7 to 9 are read without: some have a few
digests that were made in another way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import OptionsError

from .entries import shown
from .format import SIGNED

# The entry of the file that has the digests.
DIGESTS = "written"
# Options that change prices; what they are in plans that do not name them.
DEFAULTS: Mapping[str, Any] = {"optimizer": "adamw", "compile": "auto", "imbalance": None}
# How operations are placed.
_CHOICES = ("strategy_table", "strategies")
# The digest of all placements, which tells that they were edited.
_PLACEMENTS = "placements"
# What follows from placements, by which reading checks it.
_FOLLOWING = tuple(
    f"predicted.{part}_bytes" for part in ("peak", "weight", "gradient", "optimizer", "activation", "input")
)
# Fields whose parts have digests of their own, so that an error names the part.
_DIVIDED = ("predicted", "pipeline")
# Characters of a digest. Chosen: edits are mistakes, not attacks.
_LENGTH = 8
# The end of a whole number that is written as others are; and one that is written with an exponent as a float.
# (Each begins with what it is searched for, and looks behind after that, which is quicker.)
_WHOLE, _LARGE = re.compile(r"\.0(?<=\d\.0)(?=[,\]}])"), re.compile(r"\d(?<![\d.]\d)\d{16,}(?=[,\]}])")


def signed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's data with digests."""
    signing = {**_parts(data), _PLACEMENTS: _placed(data)}
    return {**data, DIGESTS: {name: _digest(name, value) for name, value in signing.items()}}


def is_edited(data: Mapping[str, Any]) -> bool:
    """Whether somebody edited how operations, parameters or outputs are placed; False of files without digests."""
    digest = _digest(_PLACEMENTS, _placed(data))
    return bool(data.get(DIGESTS, {}).get(_PLACEMENTS, digest) != digest)


def check_as_written(data: Mapping[str, Any]) -> None:
    """Raises :class:`OptionsError` that names the first field of ``data``, other than tables, that is not as it was
    when its digest was made, or the digest that is missing."""
    if not _is_signed(data):
        return
    if DIGESTS not in data:
        raise OptionsError(f"{DIGESTS!r} is missing, the digests of what autopar wrote")
    made, parts = data[DIGESTS], _parts(data)
    if not isinstance(made, Mapping):
        raise OptionsError(f"{DIGESTS} is {shown(made)}, not a table of digests")
    _compare({name: value for name, value in _written(made, parts).items() if not _is_table(value)}, made)
    lacking = [name for name in (*parts, _PLACEMENTS) if name not in made]
    if lacking:
        raise OptionsError(f"{DIGESTS} has no digest of {lacking[0]!r}: {_RULE}")


def check_tables_as_written(data: Mapping[str, Any]) -> None:
    """:func:`check_as_written` for tables: where an entry is wrong by itself, that is said before."""
    if _is_signed(data):
        made = data[DIGESTS]
        _compare({name: value for name, value in _written(made, _parts(data)).items() if _is_table(value)}, made)


def _is_signed(data: Mapping[str, Any]) -> bool:
    """Whether the file should have digests; a file that says to be older has none of its version."""
    made = data.get(DIGESTS)
    return data["version"] >= SIGNED or (isinstance(made, Mapping) and "version" in made)


_RULE = (
    "placements may be edited, but not what a plan was made for, nor what is predicted or was proven of it; plan again"
)


def _written(made: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """What has a digest; None where it is not there any more."""
    return {name: parts.get(name) for name in made if name != _PLACEMENTS}


def _placed(data: Mapping[str, Any]) -> list[Any]:
    return [data[name] for name in (*_CHOICES, "parameters", "outputs")]


def _compare(values: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if made[name] != _digest(name, value):
            # A folded form has a number of its own, which is not that of its data.
            own = ", the number of its form," if name == "version" else f" is {shown(value)}, which"
            rest = ", but for placements," if name in _FIXED else own
            raise OptionsError(f"{name}{rest} is not what autopar wrote there: {_RULE}")


def _is_table(value: Any) -> bool:
    rows = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, Mapping) or not all(isinstance(row, (int, float)) for row in rows)


def _parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """What has a digest, by name."""
    parts: dict[str, Any] = {}
    for name, value in {**DEFAULTS, **data}.items():
        if name in _FIXED:
            kind, fixed = _FIXED[name]
            parts[name] = fixed(value) if isinstance(value, kind) else value
        elif name == "nodes" and isinstance(value, Mapping):
            parts[name] = [[*row] for row in value.items()]  # Their order counts, too.
        elif name in _DIVIDED and isinstance(value, Mapping):
            parts |= {f"{name}.{part}": each for part, each in value.items()}
        elif name not in (*_CHOICES, DIGESTS):
            parts[name] = value
    return {name: value for name, value in parts.items() if name not in _FOLLOWING}


def _without_steps(lines: Any) -> Any:
    return [[*row[:5], *row[6:]] if isinstance(row, (list, tuple)) else row for row in lines]


def _without_bytes(holdings: Any) -> Any:
    return [row[:3] if isinstance(row, (list, tuple)) else row for row in holdings]


def _tiers(parameters: Any) -> Any:
    return {path: row[3:] if isinstance(row, (list, tuple)) else row for path, row in parameters.items()}


# What in a field is no placement, nor follows from one.
_FIXED: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
    "lines": ((list, tuple), _without_steps),
    "holdings": ((list, tuple), _without_bytes),
    "parameters": (Mapping, _tiers),
    "outputs": (Mapping, sorted),
}


def _digest(name: str, value: Any) -> str:
    """Of the value as JSON, with all numbers of one kind: programs that format JSON may write 1 for 1.0."""
    text = json.dumps([name, value], sort_keys=True)
    text = _LARGE.sub(lambda number: repr(float(number[0])), _WHOLE.sub("", text))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
