"""Findings about operations, kept on disk as one readable JSON file per kind of call.

A file only says what to try: execution confirms a rule before it is used
(:func:`autopar.passes.probe.probe.confirm`), since an operation may have changed behind an unchanged schema. Files that
cannot be read, or were written for another version of torch, are ignored. Writers replace files atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.content.cache_folder import cache_folder, caching_enabled
from autopar.errors import OptionsError
from autopar.ir.node import DTYPE_NAMES, TensorType
from autopar.ir.placements import AxisStrategy, parse_placement, shard_dim
from autopar.passes.rule_language.registry import OpCall

from .probe import Proven
from .trials import Range

# Of the file's form: raised by hand when findings mean something else.
VERSION = 1


@dataclass(frozen=True)
class Finding:
    """The finding about a kind of call: its strategies, where they come from (``source``: registered, DTensor, probed,
    trusted), and in how many ``cases`` they were tried; or the ``reason`` why there are none. ``refuted``: claims that
    failed."""

    source: str
    strategies: tuple[Proven, ...] = ()
    cases: int = 0
    ranges: Mapping[int, Range] = field(default_factory=dict)
    reason: str = ""
    harmful: bool = False
    refuted: tuple[str, ...] = ()


def describe(call: OpCall, schema: str) -> dict[str, Any]:
    """The kind of a call: everything about it except the sizes of its tensors (length 1 counts as a kind of dim)."""

    def kind(tensor: TensorType | None) -> str:
        if tensor is None:
            return "none"
        dims = ", ".join("1" if int(size) == 1 else "n" for size in tensor.shape)
        return f"{DTYPE_NAMES[tensor.dtype]}[{dims}]"

    return {
        "autopar": VERSION,
        "torch": torch.__version__,
        "op": call.op,
        "schema": schema,
        "arguments": repr((call.args, call.kwargs)),
        "operands": list(map(kind, call.inputs)),
        "results": list(map(kind, call.outputs)),
    }


def key_of(description: Mapping[str, Any]) -> str:
    """A short name for a kind of call."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


def file_of(description: Mapping[str, Any]) -> Path:
    """The file of the finding about a kind of call."""
    name = "".join(c if c.isalnum() else "_" for c in str(description["op"]))
    return cache_folder() / "rules" / f"{name}-{key_of(description)}.json"


def store(description: Mapping[str, Any], finding: Finding) -> None:
    """Stores a finding; a folder that cannot be written to is not an error."""
    data = {
        **description,
        "source": finding.source,
        "cases": finding.cases,
        "strategies": {str(p.strategy): "even shards" if p.even else "any shards" for p in finding.strategies},
        "integers": {str(i): [r.low, r.high, r.of] for i, r in finding.ranges.items()},
    }
    if not caching_enabled():
        return
    path = file_of(description)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(data, indent=1) + "\n")
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)


def load(description: Mapping[str, Any], call: OpCall) -> Finding | None:
    """The stored finding about this kind of call; None if there is none, or none that is valid."""
    if not caching_enabled():
        return None
    try:
        data = json.loads(file_of(description).read_text())
        if any(data[name] != value for name, value in description.items()):
            return None
        strategies = tuple(_proven(text, how, call) for text, how in data["strategies"].items())
        ranges = {
            int(i): Range(int(low), int(high), of and (int(of[0]), int(of[1])))
            for i, (low, high, of) in data["integers"].items()
        }
        if data["source"] not in ("probed", "DTensor"):
            return None
        return Finding(data["source"], strategies, int(data["cases"]), ranges)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OptionsError):
        return None


def _proven(text: str, how: str, call: OpCall) -> Proven:
    strategy = parse_strategy(text)
    if len(strategy.inputs) != len(call.inputs) or how not in ("even shards", "any shards"):
        raise ValueError(f"{text!r} is not a strategy of {call.op}")
    for tensor, place in zip(call.tensors, strategy.places, strict=True):
        dim = shard_dim(place)
        if dim is not None and (tensor is None or dim >= tensor.rank):
            raise ValueError(f"{text!r} shards a dim that does not exist")
    return Proven(strategy, how == "even shards")


def parse_strategy(text: str) -> AxisStrategy:
    """The inverse of ``str(strategy)``. Raises :class:`OptionsError` or ValueError."""
    left, right = text.split(" -> ")
    inputs, outputs = (tuple(map(parse_placement, side.split())) for side in (left, right))
    return AxisStrategy(inputs, outputs)
