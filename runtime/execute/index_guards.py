"""ATen look-ups for CPUs: an index that is out of range is noted, and the program continues
(:mod:`autopar.ops.index_range`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from autopar.ir.program import Section
from autopar.ops.index_range import any_outside, poisoned

Operation = Callable[..., Any]

# By operation: the position of the index among the arguments, and the size of the dim it indexes.
_LOOKUPS: Mapping[str, tuple[int, Callable[[tuple[Any, ...]], int]]] = {
    "aten.embedding.default": (1, lambda args: int(args[0].shape[0])),
    "aten.embedding_dense_backward.default": (1, lambda args: int(args[2])),
    **{
        f"aten.{name}": (2, lambda args: int(args[0].shape[args[1]]) if args[0].dim() else 1)
        for name in (
            "gather.default", "index_select.default", "scatter.value", "scatter_.value", "scatter.src", "scatter_.src",
            "scatter_add.default", "index_add.default",
        )
    },
}  # fmt: skip
_INDEXED = (
    "aten.index.Tensor",
    "aten._unsafe_index.Tensor",
    "aten.index_put.default",
    "aten._unsafe_index_put.default",
)


def _guarded(operation: Operation, position: int, size_of: Callable[[tuple[Any, ...]], int]) -> Operation:
    def run(*args: Any, **kwargs: Any) -> Any:
        size = size_of(args)
        if size == 0 or not any_outside(args[position], 0, size):
            return operation(*args, **kwargs)
        inside = args[position].clamp(0, size - 1)
        return poisoned(operation(*args[:position], inside, *args[position + 1 :], **kwargs), True)

    return run


def _guarded_indexing(operation: Operation) -> Operation:
    def run(x: torch.Tensor, indices: list[torch.Tensor | None], *args: Any, **kwargs: Any) -> Any:
        sized = [(index, size) for index, size in zip(indices, x.shape, strict=False)]
        bad = [index is not None and size > 0 and any_outside(index, -size, size) for index, size in sized]
        if not any(bad):
            return operation(x, indices, *args, **kwargs)
        inside = [
            index.clamp(-size, size - 1) if wrong and index is not None else index
            for wrong, (index, size) in zip(bad, sized, strict=True)
        ]
        return poisoned(operation(x, inside, *args, **kwargs), True)

    return run


def _operation(name: str) -> Operation:
    _, packet, overload = name.split(".")
    operation: Operation = getattr(getattr(torch.ops.aten, packet), overload)
    return operation


GUARDED: Mapping[str, Operation] = {
    **{name: _guarded(_operation(name), *known) for name, known in _LOOKUPS.items()},
    **{name: _guarded_indexing(_operation(name)) for name in _INDEXED},
}
"""Guarded operations, by the names that programs use."""


def looks_up(sections: Iterable[Section]) -> bool:
    """Whether ``sections`` have an operation that notes indices out of range when it runs on CPUs."""
    operations = {instruction.op for section in sections for instruction in section.instructions}
    return any(name in GUARDED or name.startswith("autopar.masked_") for name in operations)
