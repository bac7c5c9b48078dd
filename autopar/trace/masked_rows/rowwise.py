"""Runs a function of selected rows on all rows, if it treats each row by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.torch_internals.trees import tree_flatten, tree_unflatten

from .branches import SelectionError
from .gather_scatter import is_one, masked, same_selection
from .rowwise_proof import RowwiseResult, by_rows, hint, rows_of, without_modes
from .tensors import Rows, Selection, is_count


def each_row(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function of selected rows. Raises :class:`SelectionError` unless it treats each row by itself."""
    leaves, spec = tree_flatten((args, kwargs))
    rows = [leaf for leaf in leaves if isinstance(leaf, Rows)]
    selection = same_selection([r.selection for r in rows])
    used = sorted({i for r in rows for i in range(r.grid) if not is_one(r.data_.shape[r.pos + i])})
    analysis = _analyse(func, leaves, spec)
    fill = None if analysis.tame else 1.0
    dense = {id(r): _dense(r, used, fill) for r in rows}
    sizes = [selection.mask.shape[i] for i in used]
    for position in analysis.written:
        target = [leaf for leaf in leaves if isinstance(leaf, Tensor)][position]
        assert isinstance(target, Rows)
        if len(target.sharing) > 1:
            raise SelectionError("selected rows are changed in place where they have views; do it out of place")
        dense[id(target)] = dense[id(target)].clone()
    filled = [_filled(leaf, dense, sizes) for leaf in leaves]
    positional, named = tree_unflatten(filled, spec)
    result = func(*positional, **named)
    _take_over(analysis.written, leaves, dense, used, selection, analysis.tame)
    results, out_spec = tree_flatten(result)
    written = {id(dense[id(r)]): r for r in rows} if analysis.written else {}
    dims = iter(analysis.dims)
    outputs: list[Any] = []
    for leaf in results:
        dim = next(dims) if isinstance(leaf, Tensor) else None
        if id(leaf) in written or dim is None:
            outputs.append(written.get(id(leaf), leaf))
        else:
            outputs.append(_as_rows(leaf, dim, used, selection, rows, analysis.views, analysis.tame))
    return tree_unflatten(outputs, out_spec)


def _analyse(func: Any, leaves: list[Any], spec: Any) -> RowwiseResult:
    """Runs :func:`autopar.trace.masked_rows.rowwise_proof.by_rows` on meta tensors."""
    tensors = [leaf.data_ if isinstance(leaf, Rows) else leaf for leaf in leaves if isinstance(leaf, Tensor)]
    count = rows_of(tensors)
    placed: dict[int, int] = {}

    def stand_in(leaf: Any) -> Any:
        if is_count(leaf):
            return count
        if isinstance(leaf, torch.SymInt):
            return hint(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [hint(size) for size in (leaf.data_ if isinstance(leaf, Rows) else leaf).shape]
        if isinstance(leaf, Rows):
            shape[leaf.pos : leaf.pos + leaf.grid] = [count]
        empty = torch.empty(shape, dtype=(leaf.data_ if isinstance(leaf, Rows) else leaf).dtype, device="meta")
        if isinstance(leaf, Rows):
            placed[id(empty)] = leaf.pos
        return empty

    with without_modes():
        stand_ins = {id(leaf): stand_in(leaf) for leaf in leaves}
        args, kwargs = tree_unflatten([stand_ins[id(leaf)] for leaf in leaves], spec)
        return by_rows(func, args, kwargs, placed, count)


def _dense(rows: Rows, used: list[int], fill: float | None) -> Tensor:
    """All rows as one dim, for the dims of the grid in ``used``."""
    data = (
        rows.data_
        if fill is None or not rows.data_.is_floating_point()
        else masked(rows.data_, rows.selection, rows.pos, fill)
    )
    grid = [rows.selection.mask.shape[i] if i in used else 1 for i in range(rows.grid)]
    shape = [*data.shape[: rows.pos], *grid, *data.shape[rows.pos + rows.grid :]]
    total = _product([grid[i] for i in used])
    return data.expand(shape).reshape(*shape[: rows.pos], total, *shape[rows.pos + rows.grid :])


def _product(sizes: list[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def _filled(leaf: Any, dense: dict[int, Tensor], sizes: list[Any]) -> Any:
    if isinstance(leaf, Rows):
        return dense[id(leaf)]
    return _product(sizes) if is_count(leaf) else leaf


def _as_rows(
    result: Tensor, dim: int, used: list[int], selection: Selection, rows: list[Rows], views: bool, tame: bool
) -> Tensor:
    data = _on_grid(result, dim, used, selection)
    if not tame and data.is_floating_point():
        data = masked(data, selection, dim)
    return Rows.make(data, selection, dim, sharing=rows[0].sharing if views else None)


def _on_grid(result: Tensor, dim: int, used: list[int], selection: Selection) -> Tensor:
    grid = [selection.mask.shape[i] if i in used else 1 for i in range(selection.mask.dim())]
    return result.reshape(*result.shape[:dim], *grid, *result.shape[dim + 1 :])


def _take_over(
    written: tuple[int, ...],
    leaves: list[Any],
    dense: dict[int, Tensor],
    used: list[int],
    selection: Selection,
    tame: bool,
) -> None:
    """Updates the operands that were changed in place."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for position in written:
        target = tensors[position]
        assert isinstance(target, Rows)
        data = _on_grid(dense[id(target)], target.pos, used, selection)
        target.__dict__["data_"] = data if tame else masked(data, selection, target.pos)
        target.__dict__["coordinates"] = None
