"""Sums, means and losses over rows selected by values. A mean divides by how many rows the mask selects, a tensor; over
none it is NaN, as in torch. Losses are taken of each element, and reduced after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .branches import SelectionError
from .functions import Mode, handles
from .gather_scatter import masked, same_selection, whole
from .rowwise import each_row
from .tensors import Rows

Losses = tuple[Callable[..., Tensor], ...]
_LOSSES: Losses = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.soft_margin_loss, F.poisson_nll_loss,
)  # fmt: skip
_CLASSES: Losses = (F.cross_entropy, F.nll_loss)


@handles(torch.sum, Tensor.sum)
def _sum(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _reduced(args, kwargs, mean=False)


@handles(torch.mean, Tensor.mean)
def _mean(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _reduced(args, kwargs, mean=True)


def _reduced(args: tuple[Any, ...], kwargs: dict[str, Any], *, mean: bool) -> Any:
    x = args[0]
    if not isinstance(x, Rows):
        return NotImplemented
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    rank = x.data_.dim() - x.grid + 1
    if dims is None:
        reduced = list(range(rank))
    else:
        reduced = [d % rank for d in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    if x.pos not in reduced:
        return NotImplemented
    if kwargs.get("keepdim") or len(args) > 2 or kwargs.get("dtype") is not None:
        raise SelectionError("a sum over selected rows with keepdim or dtype; sum plainly, and unsqueeze or cast after")
    return _over_rows(x, reduced, mean=mean)


def _over_rows(x: Rows, reduced: list[int], *, mean: bool) -> Tensor:
    """The sum over the rows and other dims of the tensor that ``x`` represents, or the mean."""
    others = [d if d < x.pos else d + x.grid - 1 for d in reduced if d != x.pos]
    total = whole(x).sum([*range(x.pos, x.pos + x.grid), *others])
    if not mean:
        return total
    count = x.selection.mask.sum().to(total.dtype)
    for dim in others:
        count = count * x.data_.shape[dim]
    return total / count


def _given(loss: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by name, with ``reduction`` instead of what torch had before."""
    bound = inspect.signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise SelectionError(
            "a loss of selected rows with size_average or reduce; say reduction='mean', 'sum' or 'none'"
        )
    return given


def _loss_handler(loss: Callable[..., Tensor]) -> Any:
    def handler(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(value, Rows) for value in (*args, *kwargs.values())):
            return NotImplemented
        given = _given(loss, args, kwargs)
        reduction = given["reduction"]
        each = _each(loss, given | {"reduction": "none"})
        if reduction == "none":
            return each
        if reduction == "batchmean":
            return _over_rows(each, _dims(each), mean=False) / each.selection.mask.sum().to(each.data_.dtype)
        return _over_rows(each, _dims(each), mean=reduction == "mean")

    return handler


def _each(loss: Callable[..., Tensor], given: dict[str, Any]) -> Rows:
    """The loss of each element: of all places, of which those not selected have a number that any loss takes."""
    rows = [value for value in given.values() if isinstance(value, Rows)]
    selection, first = same_selection([value.selection for value in rows]), rows[0]
    others = [v for v in given.values() if isinstance(v, Tensor) and not isinstance(v, Rows)]
    behind = first.data_.dim() - first.pos - first.grid
    if any((r.pos, r.data_.dim()) != (first.pos, first.data_.dim()) for r in rows) or any(
        o.dim() > behind for o in others
    ):
        raise SelectionError("tensors of other dims meet in a loss of selected rows; select all of them alike")
    made = loss(**{name: _full(value) if isinstance(value, Rows) else value for name, value in given.items()})
    return Rows.make(masked(made, selection, first.pos), selection, first.pos)


def _full(x: Rows) -> Tensor:
    data = masked(x.data_, x.selection, x.pos, 0.5) if x.data_.is_floating_point() else x.data_
    return data.expand(*data.shape[: x.pos], *x.selection.mask.shape, *data.shape[x.pos + x.grid :])


def _dims(x: Rows) -> list[int]:
    return list(range(x.data_.dim() - x.grid + 1))


def _class_handler(loss: Callable[..., Tensor]) -> Any:
    """Of classes by number: those of other rows are ignored, which leaves them out of a weighted mean too."""

    def handler(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(value, Rows) for value in (*args, *kwargs.values())):
            return NotImplemented
        given = _given(loss, args, kwargs)
        scores, target, reduction = given["input"], given["target"], given["reduction"]
        if target.is_floating_point():
            each = each_row(loss, (), given | {"reduction": "none"})
            return each if reduction == "none" else _over_rows(each, _dims(each), mean=reduction == "mean")
        if not isinstance(scores, Rows) or not isinstance(target, Rows) or scores.pos or target.pos:
            raise SelectionError("selected rows and others meet in a loss; select scores and classes alike")
        selection = same_selection([scores.selection, target.selection])
        mask = selection.mask
        classes = target.data_.expand(*mask.shape, *target.data_.shape[mask.dim() :])
        kept = mask.reshape(*mask.shape, *[1] * (classes.dim() - mask.dim()))
        ignored = torch.full((), given["ignore_index"], dtype=classes.dtype, device=classes.device)
        given["input"] = whole(scores).flatten(0, mask.dim() - 1)
        given["target"] = torch.where(kept, classes, ignored).flatten(0, mask.dim() - 1)
        made = loss(**given)
        return Rows.make(made.unflatten(0, mask.shape), selection, 0) if reduction == "none" else made

    return handler


for _loss in _LOSSES:
    handles(_loss)(_loss_handler(_loss))
for _loss in _CLASSES:
    handles(_loss)(_class_handler(_loss))
