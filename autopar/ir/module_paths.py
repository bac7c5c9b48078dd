"""Module paths: folds the numbers of repeated layers, and suggests paths for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence, Set


def fold_path(path: str, layers: Set[str] = frozenset()) -> tuple[str, tuple[int, ...]]:
    """A module path without its layer numbers, and those numbers: ``h.3.attn`` -> ``("h.*.attn", (3,))``.

    The number of a container's element counts if something follows it, or if the path is one of ``layers`` (see
    :func:`layers_among`): ``net.0``, a leaf, is not a layer.
    """
    parts = path.split(".")
    last = len(parts) if path in layers else len(parts) - 1
    numbers = tuple(int(part) for part in parts[:last] if part.isdigit())
    return ".".join("*" if p.isdigit() and i < last else p for i, p in enumerate(parts)), numbers


def layers_among(paths: Iterable[str]) -> frozenset[str]:
    """The elements of numbered containers that hold modules themselves: ``h.0`` if ``h.0.attn`` is there too."""
    layers: set[str] = set()
    for path in paths:
        parts = path.split(".")
        layers.update(".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part.isdigit())
    return frozenset(layers)


def outermost_layer(path: str, layers: Set[str]) -> str:
    """The outermost of ``layers`` (:func:`layers_among`) that a module path is in, or is; "" if none."""
    parts = path.split(".")
    prefixes = (".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit())
    return next((prefix for prefix in prefixes if prefix in layers), "")


def block_of(path: str) -> str:
    """The outermost element of a numbered container that a module path is in: ``h.3`` of ``h.3.attn``; "" if none."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def did_you_mean(name: str, paths: Sequence[str]) -> str:
    """``; did you mean 'h.0.attn'?`` with up to four of the ``paths`` that resemble ``name``, or end with it because
    ``name`` leaves out the outer modules; "" if none do."""
    close = difflib.get_close_matches(name, paths, 4, 0.6)
    ends = [path for path in paths if name and path.endswith(f".{name}")][:4]
    suggestions = list(dict.fromkeys([*ends, *close]))[:4]
    return f"; did you mean {', '.join(map(repr, suggestions))}?" if suggestions else ""
