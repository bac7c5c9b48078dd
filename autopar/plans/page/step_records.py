"""Reads the JSON lines that :class:`autopar.monitor.Monitor` wrote: the figures that the page of a plan shows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import fspath
from typing import Any

from autopar.errors import OptionsError
from autopar.files import FileName, read_bytes

# The figures of a record that the page needs.
SHOWN = ("step", "seconds", "predicted_seconds", "memory_bytes", "mfu", "tokens_per_second", "straggler")
# How the monitor begins a line.
_BEGINNING = b'{"step": '
# How the monitor writes what JSON has no number for.
_NOT_FINITE = ("nan", "inf", "-inf")
# Chosen: more than bytes or tokens that anything has, and far below the largest float.
_MOST = 1e24
# The longest value that an error repeats.
# Chosen: half a line.
_LONGEST = 40


@dataclass(frozen=True)
class Record:
    """The figures of a step by name. ``starts``: whether it is the first of a run, which planned and compiled in it."""

    figures: Mapping[str, float]
    starts: bool


class _NoFigure(ValueError):
    """Something that no run writes."""


def read_records(path: FileName) -> list[Record]:
    """The record of each step, with the figures that are finite. Raises :class:`OptionsError` if the file cannot be
    read, and for a line that no run writes. Half a line that a run left when it was killed is left out, at the end or
    before the records of its restart."""
    lines = read_bytes(path, "the record").splitlines()
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            records += _records(line, records)
        except (ValueError, RecursionError) as error:
            raise OptionsError(
                f"{fspath(path)!r}, line {number}: {_reason(error)}. Give the steps.jsonl that "
                "autopar.monitor.Monitor(folder=...) wrote; delete a line that something else has damaged"
            ) from error
    return records


def _records(line: bytes, before: Sequence[Record]) -> list[Record]:
    """The record of a line, none of half a line."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        # Monitors of earlier versions went on in the line in which the run before was killed.
        at = max(0, line.rfind(_BEGINNING))
        half, rest = (line[:at], line[at:]) if at else (line, b"")
        if half[: len(_BEGINNING)] != _BEGINNING[: len(half)] or half.endswith(b"}"):
            raise
        return _records(rest, before) if rest else []
    figures = _figures(record)
    step = figures.get("step", math.inf)
    # Earlier versions did not mark the first record of a run; numbers of steps go back where the last ones were lost.
    starts = not before or bool(record.get("first_of_run")) or step <= before[-1].figures.get("step", -1)
    return [Record(figures, starts)]


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, byte {error.object[error.start]:#04x} at {error.start}"
    return str(error) if isinstance(error, _NoFigure) else f"not JSON ({error})"


def _figures(record: Any) -> Mapping[str, float]:
    if not isinstance(record, dict):
        raise _NoFigure(f"{_short(record)} is not the record of a step, an object")
    shown = {name: record[name] for name in SHOWN if record.get(name) is not None and record[name] not in _NOT_FINITE}
    for name, value in shown.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
            raise _NoFigure(f"{name} is {_short(value)}, which no step has")
    return shown


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
