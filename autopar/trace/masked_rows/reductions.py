"""Sums, means and losses over rows selected by values. A mean divides by the number of rows that the mask selects, a
tensor; a mean over no rows is NaN, as in torch. Losses are computed for each element, and then reduced.
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
        raise SelectionError("a sum over selected rows with keepdim or dtype; sum without, then unsqueeze or cast")
    return _over_rows(x, reduced, mean=mean)


def _over_rows(x: Rows, reduced: list[int], *, mean: bool) -> Tensor:
    """The sum, or the mean, over the rows and other dims of the tensor that ``x`` represents."""
    others = [d if d < x.pos else d + x.grid - 1 for d in reduced if d != x.pos]
    total = whole(x).sum([*range(x.pos, x.pos + x.grid), *others])
    if not mean:
        return total
    count = x.selection.mask.sum().to(total.dtype)
    for dim in others:
        count = count * x.data_.shape[dim]
    return total / count


def _bound(loss: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by name. Raises :class:`SelectionError` for the arguments that ``reduction`` replaced."""
    bound = inspect.signature(loss).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if arguments.pop("size_average", None) is not None or arguments.pop("reduce", None) is not None:
        raise SelectionError(
            "a loss of selected rows with size_average or reduce; use reduction='mean', 'sum' or 'none'"
        )
    return arguments


def _loss_handler(loss: Callable[..., Tensor]) -> Any:
    def handler(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(value, Rows) for value in (*args, *kwargs.values())):
            return NotImplemented
        arguments = _bound(loss, args, kwargs)
        reduction = arguments["reduction"]
        each = _each(loss, arguments | {"reduction": "none"})
        if reduction == "none":
            return each
        if reduction == "batchmean":
            return _over_rows(each, _dims(each), mean=False) / each.selection.mask.sum().to(each.data_.dtype)
        return _over_rows(each, _dims(each), mean=reduction == "mean")

    return handler


def _each(loss: Callable[..., Tensor], arguments: dict[str, Any]) -> Rows:
    """The loss of each element, for all places; those that are not selected have a value that any loss takes."""
    rows = [value for value in arguments.values() if isinstance(value, Rows)]
    selection, first = same_selection([value.selection for value in rows]), rows[0]
    others = [v for v in arguments.values() if isinstance(v, Tensor) and not isinstance(v, Rows)]
    behind = first.data_.dim() - first.pos - first.grid
    if any((r.pos, r.data_.dim()) != (first.pos, first.data_.dim()) for r in rows) or any(
        o.dim() > behind for o in others
    ):
        raise SelectionError("a loss of selected rows has tensors of different dims; select all in the same way")
    losses = loss(**{name: _full(value) if isinstance(value, Rows) else value for name, value in arguments.items()})
    return Rows.make(masked(losses, selection, first.pos), selection, first.pos)


def _full(x: Rows) -> Tensor:
    data = masked(x.data_, x.selection, x.pos, 0.5) if x.data_.is_floating_point() else x.data_
    return data.expand(*data.shape[: x.pos], *x.selection.mask.shape, *data.shape[x.pos + x.grid :])


def _dims(x: Rows) -> list[int]:
    return list(range(x.data_.dim() - x.grid + 1))


def _class_handler(loss: Callable[..., Tensor]) -> Any:
    """Handles a loss of class numbers: rows that are not selected get ``ignore_index``, so that a weighted mean leaves
    them out too."""

    def handler(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(value, Rows) for value in (*args, *kwargs.values())):
            return NotImplemented
        arguments = _bound(loss, args, kwargs)
        scores, target, reduction = arguments["input"], arguments["target"], arguments["reduction"]
        if target.is_floating_point():
            each = each_row(loss, (), arguments | {"reduction": "none"})
            return each if reduction == "none" else _over_rows(each, _dims(each), mean=reduction == "mean")
        if not isinstance(scores, Rows) or not isinstance(target, Rows) or scores.pos or target.pos:
            raise SelectionError("a loss has selected and other rows; select scores and classes in the same way")
        selection = same_selection([scores.selection, target.selection])
        mask = selection.mask
        classes = target.data_.expand(*mask.shape, *target.data_.shape[mask.dim() :])
        selected = mask.reshape(*mask.shape, *[1] * (classes.dim() - mask.dim()))
        ignored = torch.full((), arguments["ignore_index"], dtype=classes.dtype, device=classes.device)
        arguments["input"] = whole(scores).flatten(0, mask.dim() - 1)
        arguments["target"] = torch.where(selected, classes, ignored).flatten(0, mask.dim() - 1)
        losses = loss(**arguments)
        return Rows.make(losses.unflatten(0, mask.shape), selection, 0) if reduction == "none" else losses

    return handler


for _loss in _LOSSES:
    handles(_loss)(_loss_handler(_loss))
for _loss in _CLASSES:
    handles(_loss)(_class_handler(_loss))
