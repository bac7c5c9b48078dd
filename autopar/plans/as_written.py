"""Tells whether somebody changed in a plan's file what the plan was made for.

Choices may be edited: what they are and cost is written in several places, which are compared
(:mod:`.validate`). What a plan was made for is written once. A mesh, for one, follows from nothing else in a plan under
which every device has all of everything. So a file has a digest of each such field. Files of earlier versions of
autopar have none, and are read without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from autopar.errors import OptionsError

# The entry of the file that has the digests.
DIGESTS = "written"
FIELDS = (
    *("mesh", "batch", "stages", "microbatches", "schedule", "pipeline.meshes"),
    *("cluster", "graph_hash", "precision", "optimizer", "compile", "imbalance", "memory_limit"),
    *("status", "objective", "bound", "gap"),
)
# Characters of a digest. Chosen: edits are mistakes, not attacks.
_LENGTH = 8
# Options that change prices; what they are in plans that do not name them.
DEFAULTS: Mapping[str, Any] = {"optimizer": "adamw", "compile": "auto", "imbalance": None}


def digests(data: Mapping[str, Any]) -> dict[str, str]:
    """By field, the digest of what ``data``, the plan's, has there."""
    complete = {**DEFAULTS, **data}
    return {name: _digest(name, _at(complete, name)) for name in FIELDS}


def check_as_written(data: Mapping[str, Any]) -> None:
    """Raises :class:`OptionsError` that names a field of ``data`` that is not as it was when its digest was made."""
    made = data.get(DIGESTS, {})
    if not isinstance(made, dict):
        raise OptionsError(f"{DIGESTS} is {made!r}, not a table of digests")
    for name, digest in digests(data).items():
        if made.get(name, digest) != digest:
            raise OptionsError(
                f"{name} is {json.dumps(_at(data, name))}, which is not what autopar wrote there: a plan's choices may "
                "be edited, but not what it was made for, nor what was proven of it; plan again for that"
            )


def _at(data: Any, name: str) -> Any:
    for part in name.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _digest(name: str, value: Any) -> str:
    text = json.dumps([name, _plain(value)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def _plain(value: Any) -> Any:
    """The value, with all numbers of one kind: programs that format JSON may write 1 for 1.0."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if type(value) is int and abs(value) < 1 << 62 else value
