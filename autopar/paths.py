"""Module paths of repeated layers."""

from __future__ import annotations


def fold_path(path: str) -> tuple[str, tuple[int, ...]]:
    """A module path without its layer numbers, and those numbers: ``h.3.attn`` -> ``("h.*.attn", (3,))``.

    The number of a container's element counts only if something follows it: ``net.0``, a leaf, is no layer.
    """
    parts = path.split(".")
    numbers = tuple(int(part) for part in parts[:-1] if part.isdigit())
    return ".".join("*" if p.isdigit() and i < len(parts) - 1 else p for i, p in enumerate(parts)), numbers
