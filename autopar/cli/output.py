"""The output of a command: JSON for programs, text for people, progress on a terminal only."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.ir.placements import StridedShard, UnequalShard, short
from autopar.ir.plan_record import PlanRecord
from autopar.plans.json import plan_to_dict

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def jsonable(value: Any) -> Json:
    """``value`` as plain JSON: dataclasses by field, objects with a ``to_json`` method through it, placements as
    short strings, numbers that JSON lacks (infinity, not-a-number) as null."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case TorchPlacement() | StridedShard() | UnequalShard():
            return short(value)
        case torch.Tensor():
            return jsonable(value.tolist())
        case Mapping():
            return {str(key): jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [jsonable(item) for item in value]
        case Set():
            return sorted((jsonable(item) for item in value), key=str)
    return _object_jsonable(value)


def _object_jsonable(value: Any) -> Json:
    if isinstance(value, PlanRecord):
        return jsonable(plan_to_dict(value))  # Each row whole, for programs that look for one.
    if hasattr(value, "to_json"):
        decoded: Json = json.loads(value.to_json())
        return decoded
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: jsonable(item) for name, item in fields.items()}
    if hasattr(value, "item"):
        return jsonable(value.item())
    return str(value) if isinstance(value, (PurePath, torch.dtype, torch.device)) else repr(value)


@dataclasses.dataclass(frozen=True)
class Output:
    """Prints a command's result: with ``json`` one JSON document, else text.

    Results go to standard output; progress and errors to standard error, so that output can be piped.
    """

    json: bool = False

    def result(self, text: object, data: object) -> None:
        """Prints ``data`` as JSON, or else ``text`` unchanged, so that tables keep their columns."""
        if self.json:
            print(json.dumps(jsonable(data), indent=2))
        else:
            print(str(text).rstrip("\n"))

    def error(self, message: str, kind: str) -> None:
        """Prints an error message; with ``json`` also as a document, so that a program need not parse text."""
        if self.json:
            print(json.dumps({"error": message, "kind": kind}, indent=2))
        print(f"autopar: {message}", file=sys.stderr)

    def note(self, message: str) -> None:
        """Prints a remark for people to standard error, in addition to the result."""
        print(message, file=sys.stderr)

    @contextlib.contextmanager
    def progress(self, message: str) -> Iterator[None]:
        """Shows ``message`` with a spinner while the body runs, if standard error is a terminal."""
        from rich.console import Console  # Here, since what shows no progress does without.

        console = Console(stderr=True)
        if not console.is_terminal:
            yield
            return
        with console.status(message):
            yield
