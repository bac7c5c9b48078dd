"""Pads calls with fewer rows than planned: ``Options(last_batch="pad")``.

The last row is repeated until the batch has the planned size, the program of that size runs, and outputs are cut to the
user's rows. This is exact only if rows do not influence each other, which :class:`Padding` proves or refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import PlanMismatchError
from autopar.ir.signature import Signature
from autopar.torch_internals.trees import tree_unflatten

from .compiled import Padding
from .signature import CompiledCall, flatten_as, same_value


@dataclass(frozen=True)
class Filled:
    """A call padded to ``batch`` rows, of which the first ``rows`` are the user's."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    batch: int


def filled(
    calls: Iterator[tuple[object, CompiledCall]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Filled | None:
    """The call padded to one that ``calls`` were compiled for; None if it differs in more than its number of rows."""
    for _, call in calls:
        padded = None if call.padding is None else _filled(call.padding, call.signature, args, kwargs)
        if padded is not None:
            return padded
    return None


def _filled(padding: Padding, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Filled | None:
    try:
        leaves = flatten_as(signature.input_spec, args, kwargs)
    except PlanMismatchError:
        return None
    counts: set[int] = set()
    for index, (name, leaf) in enumerate(zip(signature.input_names, leaves, strict=True)):
        if name is None:
            if not same_value(signature.constants.get(index), leaf):
                return None
            continue
        shape, dtype, has_rows = padding.inputs[name]
        first = 1 if has_rows else 0
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != dtype or leaf.dim() != len(shape):
            return None
        if tuple(leaf.shape[first:]) != shape[first:]:
            return None
        counts.update(leaf.shape[:first])
    if len(counts) != 1 or not padding.holds_for(rows := counts.pop()):
        return None
    names = signature.input_names
    padded_leaves = [
        _repeated(leaf, padding.batch) if name is not None and padding.inputs[name][2] else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    positional, keywords = tree_unflatten(padded_leaves, signature.input_spec)
    return Filled(tuple(positional), dict(keywords), rows, padding.batch)


def _repeated(value: torch.Tensor, batch: int) -> torch.Tensor:
    """``value`` padded with copies of its last row, whose numbers are as finite as the others'."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return torch.cat([whole, whole[-1:].expand(batch - whole.shape[0], *whole.shape[1:])])


@dataclass(frozen=True)
class Cut:
    """Cuts the outputs of a padded call to the user's rows; ``dims``: the dim of each output that is the rows."""

    dims: Mapping[str, int | None]
    rows: int
    batch: int

    def __call__(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._cut(value, self.dims.get(name)) for name, value in outputs.items()}

    def _cut(self, value: torch.Tensor, dim: int | None) -> torch.Tensor:
        return value if dim is None else value.narrow(dim, 0, value.shape[dim] // self.batch * self.rows)


def cut_of(call: CompiledCall, padded: Filled | None) -> Cut:
    """How outputs of ``call`` are cut. Collective at the first use. Raises :class:`AutoparError` if added rows would
    change others."""
    if padded is None:
        return Cut({}, 1, 1)
    assert call.padding is not None
    return Cut(call.padding.outputs(call.output_name), padded.rows, padded.batch)
