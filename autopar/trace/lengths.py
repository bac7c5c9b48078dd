"""Sizes of inputs besides the batch size that a trace may leave open, such as the length of sequences.

A first trace fixes them, since a symbol costs what the model specialises for its size. When a later call differs in
nothing but such sizes, they become symbols (``l0``, ``l1``, ...) of a new trace, of which the graph of any other size
follows by substitution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch

from autopar.ir.node import TensorType

# The graph's name for the batch size.
BATCH = "b"
# The smallest size that stands for a symbol.
# Chosen: torch and models treat 0 and 1, and some filters up to 3, as special.
_SMALLEST = 5


@dataclass(frozen=True)
class Length:
    """Dim ``dim`` of the input ``input`` has the size ``symbol``."""

    input: str
    dim: int
    symbol: str


Lengths = tuple[Length, ...]


def varying(types: Mapping[str, TensorType], tensors: Mapping[str, torch.Tensor]) -> Lengths | None:
    """Where ``tensors`` have other sizes than inputs of ``types``, whose batch size is symbolic; sizes that changed
    alike share a symbol. None if anything else differs."""
    if list(types) != list(tensors):
        return None
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, kind in types.items():
        tensor = tensors[name]
        if tensor.dim() != kind.rank or tensor.dtype != kind.dtype:
            return None
        for dim, (before, now) in enumerate(zip(kind.shape, tensor.shape, strict=True)):
            if isinstance(before, sympy.Basic) or before == now:
                continue
            if min(int(before), now) < 2:
                return None
            found.setdefault((int(before), now), []).append((name, dim))
    return tuple(Length(*place, f"l{index}") for index, places in enumerate(found.values()) for place in places)


def real_lengths(lengths: Lengths, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes that the symbols have in a call."""
    return {length.symbol: int(tensors[length.input].shape[length.dim]) for length in lengths}


def fresh_prime(sizes: set[int], real: int) -> int:
    """A prime that divides none of ``sizes``, so that no size equals a symbol's by chance. It is the smallest such
    prime above the ``real`` size, so that comparisons with fixed numbers have the same result as for that."""
    candidate = max(11, real + 1) | 1
    while not _is_fresh(candidate, sizes):
        candidate += 2
    return candidate


def prime_below(sizes: set[int], real: int) -> int:
    """Like :func:`fresh_prime`, but below the ``real`` size if there is one: models have tables of positions, which end
    at a greatest length."""
    below = (size for size in range(real - 1, _SMALLEST - 1, -1) if _is_fresh(size, sizes))
    return next(below, None) or fresh_prime(sizes, real)


def _is_fresh(candidate: int, sizes: set[int]) -> bool:
    return bool(sympy.isprime(candidate)) and all(size % candidate for size in sizes if size)
