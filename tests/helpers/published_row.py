"""A made-up published row, and rows that differ from one in some fields."""

from __future__ import annotations

from typing import Any

from benchmarks.published import Models

MODELS = Models()
"""What one test has traced and placed the others need not."""


def made_up(**parts: dict[str, Any]) -> dict[str, Any]:
    """A row of a small decoder; ``parts`` are its ``cluster`` and ``parallel``."""
    return {
        "id": "made up",
        "source": "nobody 2021",
        "row": "small",
        "model": {"layers": 4, "hidden": 256, "heads": 4, "seq": 128, "vocab": 1000, "params": 4e6},
        **parts,
        "measured": {"iter_s": 0.05},
    }


def change(row: dict[str, Any], part: str, **values: object) -> dict[str, Any]:
    """The row with other values of some fields of one of its parts."""
    return {**row, part: {**row[part], **values}}
