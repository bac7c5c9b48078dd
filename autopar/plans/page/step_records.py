"""Reads the JSON lines that :class:`autopar.monitor.Monitor` wrote: the figures that the page of a plan shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from autopar.errors import OptionsError

# The figures of a record that the page shows.
SHOWN = ("seconds", "memory_bytes", "mfu", "tokens_per_second", "straggler")
# How the monitor writes what JSON has no number for.
_NOT_FINITE = ("nan", "inf", "-inf")
# Chosen: more than bytes or tokens that anything has, and far below the largest float.
_MOST = 1e24
# The longest value that an error repeats.
# Chosen: half a line.
_LONGEST = 40


class _NoFigure(ValueError):
    """Something that no run writes."""


def read_records(path: str | PathLike[str]) -> list[Mapping[str, float]]:
    """The figures of each step by name, without those that are not finite. Raises :class:`OptionsError` if the file
    cannot be read, and for a line that no run writes; half a line at the end is left out, as of a run that was
    killed."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise OptionsError(f"cannot read the record {fspath(path)!r}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_figures(json.loads(line.decode())))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not isinstance(error, _NoFigure):
                continue
            raise OptionsError(
                f"{fspath(path)!r}, line {number}: {_reason(error)}. Give the steps.jsonl that "
                "autopar.monitor.Monitor(folder=...) wrote; delete a line that something else has damaged"
            ) from error
    return records


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
