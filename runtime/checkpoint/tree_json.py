"""Trees of plain values as strict JSON: state of schedulers and data loaders, and whatever else a user saves.

JSON has neither tuples nor infinities nor keys that are numbers: what it lacks is an object with one key that begins
with ``$``. Tensors are taken out and saved beside the JSON, under the path at which they were found. Nothing is
pickled, so a value of any other class is refused, by its path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from autopar.errors import CheckpointError

# Nesting beyond which a tree is refused. Chosen: Python's own limit of recursion is a thousand.
_DEEPEST = 100
_PLAIN = (type(None), bool, int, str)


def to_json(value: Any, path: str, tensors: MutableMapping[str, torch.Tensor]) -> Any:
    """``value`` as JSON; adds its tensors to ``tensors``, named by their paths below ``path``. Raises
    :class:`CheckpointError` for a value of another class."""
    if path.count("/") > _DEEPEST:
        raise CheckpointError(f"{path[:80]}... is nested more than {_DEEPEST} deep, or contains itself")
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return _mapping(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    return _other(value, path)


def _mapping(value: Mapping[Any, Any], path: str, tensors: MutableMapping[str, torch.Tensor]) -> Any:
    simple = type(value) is not Counter and all(type(key) is str and key[:1] != "$" for key in value)
    if simple:
        return {key: to_json(item, f"{path}/{key}", tensors) for key, item in value.items()}
    pairs = [
        [to_json(key, f"{path}/key {index}", tensors), to_json(item, f"{path}/{key}", tensors)]
        for index, (key, item) in enumerate(value.items())
    ]
    return {"$counter" if type(value) is Counter else "$pairs": pairs}


def _other(value: Any, path: str) -> Any:
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    item = getattr(value, "item", None)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and item is not None:
        return to_json(item(), path, {})
    if isinstance(value, (int, str)):  # Enumerations and the like: the value, without the class.
        return int(value) if isinstance(value, int) else str.__str__(value)
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint does not hold, since nothing in it is pickled: save "
        "numbers, strings, lists, dicts or tensors of it"
    )


def from_json(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of :func:`to_json`; ``tensor(name)`` gives a tensor. Raises :class:`CheckpointError` for JSON that
    :func:`to_json` does not write."""
    if isinstance(value, list):
        return [from_json(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind[:1] != "$":
        return {key: from_json(item, tensor) for key, item in value.items()}
    if len(value) != 1 or kind not in _READERS:
        raise CheckpointError(f"the checkpoint has a value of the unknown kind {kind!r}: a newer autopar wrote it?")
    try:
        return _READERS[kind](value[kind], tensor)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint has a {kind} that is not one: {error}") from error


def _pairs(value: Any, tensor: Callable[[str], torch.Tensor]) -> dict[Any, Any]:
    return {from_json(key, tensor): from_json(item, tensor) for key, item in value}


def _dtype(value: Any, _tensor: Any) -> torch.dtype:
    found = getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{value!r} is not a dtype")
    return found


_READERS: Mapping[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "$tensor": lambda value, tensor: tensor(value),
    "$tuple": lambda value, tensor: tuple(from_json(item, tensor) for item in value),
    "$pairs": _pairs,
    "$counter": lambda value, tensor: Counter(_pairs(value, tensor)),
    "$float": lambda value, _: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value],
    "$bytes": lambda value, _: base64.b64decode(value, validate=True),
    "$dtype": _dtype,
}
