"""Takes rows out of a tensor and puts rows back into it, while all rows are computed: rows that are not selected are
zeros when taken, and unchanged when put.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .branches import SelectionError
from .tensors import Rows, Selection


@dataclass(frozen=True)
class Index:
    """``x[basic]`` has dim ``dims[i]`` for coordinate ``coordinates[i]`` of the selection, whose rows are dim
    ``pos`` of the result."""

    basic: tuple[Any, ...]
    selection: Selection
    dims: tuple[int, ...]
    coordinates: tuple[int, ...]
    pos: int


def is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and not isinstance(item, Rows)


def parse_index(x: Tensor, index: Any, select: Any) -> Index | None:
    """``index`` of ``x``, if it selects rows by coordinates or by masks alone; ``select(mask)`` makes a selection."""
    items = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(_consumed(item) for item in items)
    basic: list[Any] = []
    indexed: list[tuple[int, int, Selection]] = []
    dim = 0  # Of x[basic].
    for item in items:
        if item is Ellipsis:
            basic.append(item)
            dim += x.dim() - consumed
        elif is_mask(item) and item.dim():
            selection = select(item)
            indexed += [(dim + i, i, selection) for i in range(item.dim())]
            basic += [slice(None)] * item.dim()
            dim += item.dim()
        elif isinstance(item, Rows):
            if item.coordinates is None or len(item.coordinates) != 1 or item.data_.dim() != item.grid:
                return None
            indexed.append((dim, item.coordinates[0], item.selection))
            basic.append(slice(None))
            dim += 1
        elif item is None or isinstance(item, slice):
            basic.append(item)
            dim += 1
        elif isinstance(item, int):
            basic.append(item)
        else:
            return None
    return _index(tuple(basic), indexed)


def _consumed(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if is_mask(item) else 1


def _index(basic: tuple[Any, ...], indexed: list[tuple[int, int, Selection]]) -> Index:
    dims, coordinates = tuple(f[0] for f in indexed), tuple(f[1] for f in indexed)
    first = indexed[0][2]
    same_selection([f[2] for f in indexed])
    if len(set(coordinates)) < len(coordinates):
        raise SelectionError("one coordinate of the selected rows indexes two dims")
    if any(isinstance(item, int) for item in basic):
        raise SelectionError("a number and selected rows index one tensor; index with the number first")
    adjacent = all(b == a + 1 for a, b in pairwise(dims))
    return Index(basic, first, dims, coordinates, dims[0] if adjacent else 0)


def same_selection(selections: list[Selection]) -> Selection:
    """The selection that all of them share. Raises :class:`SelectionError` if they differ."""
    if any(selection.key != selections[0].key for selection in selections):
        raise SelectionError(
            "rows of two selections are combined here, and nothing proves that they are at the same places; select "
            "once, and use that selection for all"
        )
    return selections[0]


def _to_grid(x: Tensor, index: Index) -> Tensor:
    """``x[basic]`` with its selected dims, in the order of the grid, at the position of the rows."""
    order = sorted(range(len(index.dims)), key=lambda i: index.coordinates[i])
    others = [dim for dim in range(x.dim()) if dim not in index.dims]
    y = x.permute(*others[: index.pos], *(index.dims[i] for i in order), *others[index.pos :])
    for place, i in enumerate(order):
        size = index.selection.mask.shape[index.coordinates[i]]
        if y.shape[index.pos + place] != size:
            y = y.narrow(index.pos + place, 0, size)
    for coordinate in range(index.selection.mask.dim()):
        if coordinate not in index.coordinates:
            y = y.unsqueeze(index.pos + coordinate)
    return y


def shaped(mask: Tensor, pos: int, rank: int) -> Tensor:
    """``mask`` [g0, g1, ...] for data of that rank with the grid at ``pos``."""
    return mask.reshape(*[1] * pos, *mask.shape, *[1] * (rank - pos - mask.dim()))


def masked(data: Tensor, selection: Selection, pos: int, fill: float = 0) -> Tensor:
    """``data`` with ``fill`` in the rows that are not selected; its gradient is zero there, whatever follows."""
    used = [i for i in range(selection.mask.dim()) if not is_one(data.shape[pos + i])]
    mask = shaped(selection.over(used), pos, data.dim())
    return torch.where(mask, data, torch.full((), fill, dtype=data.dtype, device=data.device))


def is_one(size: Any) -> bool:
    return type(size) is int and size == 1


def gather(x: Tensor, index: Index) -> Rows:
    """``x[index]``."""
    data = masked(_to_grid(x[index.basic], index), index.selection, index.pos)
    return Rows.make(data, index.selection, index.pos)


def whole(rows: Rows) -> Tensor:
    """The data, zero where not selected, with every dim of the grid at its size."""
    mask = shaped(rows.selection.mask, rows.pos, rows.data_.dim())
    return torch.where(mask, rows.data_, torch.zeros((), dtype=rows.data_.dtype, device=rows.data_.device))


def _values(value: Any, index: Index, like: Tensor) -> Tensor:
    """The assigned value, as data with the grid at ``index.pos``, broadcast later to the shape of the grid view."""
    grid = index.selection.mask.dim()
    if isinstance(value, Rows):
        same_selection([index.selection, value.selection])
        data, behind = value.data_, value.data_.dim() - grid - value.pos
        if behind > like.dim() - grid - index.pos or value.pos > index.pos:
            raise SelectionError("the selected rows are assigned where they do not fit")
        if behind != like.dim() - grid - index.pos:
            raise SelectionError("the assigned rows have other dims than those that they replace")
        return data.reshape(*[1] * (index.pos - value.pos), *data.shape)
    if isinstance(value, Tensor):
        behind = like.dim() - grid - index.pos
        if value.dim() > behind:
            raise SelectionError("a tensor replaces selected rows whose number is not known")
        return value
    return torch.full((), value, dtype=like.dtype, device=like.device)


def put(x: Tensor, index: Index, value: Any, *, accumulate: bool) -> Tensor:
    """``x[index] = value`` or, if ``accumulate``, ``x[index] += value`` for every row by itself; returns a new tensor
    of the shape of ``x[basic]``."""
    target = x[index.basic]
    view = _to_grid(target, index)
    selection = index.selection
    mask = shaped(selection.mask, index.pos, view.dim())
    extra = [i for i in range(selection.mask.dim()) if i not in index.coordinates]
    values = _values(value, index, view).to(view.dtype)
    summed = tuple(index.pos + i for i in extra)
    if summed and not accumulate and not (summed == (index.pos + selection.mask.dim() - 1,) and selection.fact.single):
        raise SelectionError(
            "selected rows are assigned by one coordinate of several, so that two rows may have one place; add them by "
            "index_add_, or index with all coordinates"
        )
    zero = torch.zeros((), dtype=view.dtype, device=view.device)
    added = torch.where(mask, values, zero)
    if summed:
        added, mask = added.sum(summed, keepdim=True), _any(mask, summed)
    result = view + added if accumulate else torch.where(mask, added, view)
    return _from_grid(result, index, target)


def _any(mask: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        mask = mask.any(dim, keepdim=True)
    return mask


def _from_grid(y: Tensor, index: Index, target: Tensor) -> Tensor:
    """The inverse of :func:`_to_grid` for a result."""
    extra = [i for i in range(index.selection.mask.dim()) if i not in index.coordinates]
    for coordinate in reversed(extra):
        y = y.squeeze(index.pos + coordinate)
    order = sorted(range(len(index.dims)), key=lambda i: index.coordinates[i])
    others = [dim for dim in range(target.dim()) if dim not in index.dims]
    permutation = [*others[: index.pos], *(index.dims[i] for i in order), *others[index.pos :]]
    back = sorted(range(len(permutation)), key=lambda i: permutation[i])
    y = y.permute(*back)
    if y.shape != target.shape:
        raise SelectionError("rows are put into a tensor longer than the mask that selects them")
    return y
