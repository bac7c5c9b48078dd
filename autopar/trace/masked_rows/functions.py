"""Handlers for torch's functions that select rows by values, put rows back, or do more than a function of single rows.

Each handler gets the mode that traces and the call's arguments, and returns ``NotImplemented`` for a call that it does
not handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from .assertions import truth_without_raising
from .branches import Regions, SelectionError
from .gather_scatter import Index, parse_index, put
from .mask_facts import Facts, says_any
from .tensors import ExpertNumber, Rows, Selection, count_of


class Mode(Protocol):
    """The part of :class:`autopar.trace.masked_rows.mode.SelectedRows` that handlers use."""

    facts: Facts
    regions: Regions

    def select(self, mask: Tensor) -> Selection: ...

    def take(self, x: Tensor, index: Index) -> Rows: ...

    def skip_check(self, truth: bool, check: str) -> bool: ...


Handler = Callable[[Mode, tuple[Any, ...], dict[str, Any]], Any]
CALLS: dict[Any, Handler] = {}


def _getter(name: str) -> Any:
    """The function that torch calls to read an attribute of a tensor."""
    return getattr(Tensor, name).__get__


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Registers a handler of these functions."""

    def register(handler: Handler) -> Handler:
        CALLS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@handles(torch.where)
def _where(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs or isinstance(args[0], Rows):
        return NotImplemented
    return _places(mode, args[0])


def _places(mode: Mode, mask: Tensor) -> tuple[Rows, ...]:
    selection = mode.select(mask)
    coordinates = []
    for dim, size in enumerate(mask.shape):
        shape = [size if axis == dim else 1 for axis in range(mask.dim())]
        places = torch.arange(size, device=mask.device).reshape(shape)
        coordinates.append(Rows.make(places, selection, 0, (dim,)))
    return tuple(coordinates)


@handles(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
def _nonzero(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = args[0]
    if isinstance(mask, Rows) or not mask.dim():
        return NotImplemented
    places = _places(mode, mask)
    if kwargs.get("as_tuple") or (len(args) > 1 and args[1]):
        return places
    data = torch.stack(torch.broadcast_tensors(*(rows.data_ for rows in places)), -1)
    return Rows.make(data, places[0].selection, 0, tuple(range(mask.dim())))


@handles(Tensor.__getitem__)
def _getitem(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, items = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(x, Rows):
        return _column(x, items)
    if not any(isinstance(i, Rows) or (isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)) for i in items):
        return NotImplemented
    index = parse_index(x, args[1], mode.select)
    return NotImplemented if index is None else mode.take(x, index)


def _column(x: Rows, items: tuple[Any, ...]) -> Any:
    """One coordinate of several: ``places[:, i]``."""
    if x.coordinates is None or x.data_.dim() == x.grid or len(items) != 2 or items[0] != slice(None):
        return NotImplemented
    return _coordinate(x, items[1]) if isinstance(items[1], int) else NotImplemented


def _coordinate(x: Rows, which: int) -> Rows:
    assert x.coordinates is not None
    coordinate = x.coordinates[which]
    data = x.data_.select(-1, which)
    for dim in range(x.grid):
        data = data if dim == coordinate else data.narrow(dim, 0, 1)
    return Rows.make(data, x.selection, 0, (coordinate,))


@handles(Tensor.squeeze, torch.squeeze, Tensor.flatten, torch.flatten, Tensor.view, Tensor.reshape, torch.reshape)
def _flat(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The only coordinate as a tensor [n] of its own."""
    x = args[0]
    has_one_coordinate = (
        isinstance(x, Rows) and x.coordinates is not None and len(x.coordinates) == 1 and x.data_.dim() > x.grid
    )
    if not has_one_coordinate or kwargs or args[1:] not in ((), (-1,), (1,), ((-1,),)):
        return NotImplemented
    return _coordinate(x, 0)


@handles(Tensor.unbind, torch.unbind, _getter("T"), Tensor.t)
def _coordinates(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if isinstance(x, Rows) and dim == 0:  # As a loop does.
        return _iterate(mode, args, kwargs)
    if not isinstance(x, Rows) or x.coordinates is None or x.data_.dim() == x.grid or dim not in (1, -1):
        return NotImplemented
    return tuple(_coordinate(x, which) for which in range(len(x.coordinates)))


@handles(Tensor.long, Tensor.to, Tensor.contiguous, Tensor.cpu, Tensor.detach)
def _same_places(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    whole_number = isinstance(x, Rows) and x.coordinates is not None
    return (
        x
        if whole_number and all(a in (torch.long, x.data_.device) for a in args[1:]) and not kwargs
        else NotImplemented
    )


@handles(Tensor.masked_select, torch.masked_select)
def _masked_select(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, mask = args
    if isinstance(x, Rows) or isinstance(mask, Rows):
        return NotImplemented
    x, mask = torch.broadcast_tensors(x, mask) if x.shape != mask.shape else (x, mask)
    return _getitem(mode, (x, mask), {})


@handles(Tensor.index_select, torch.index_select)
def _index_select(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, index = args if len(args) == 3 else (*args, *kwargs.values())
    if isinstance(x, Rows) or not isinstance(index, Rows):
        return NotImplemented
    return _getitem(mode, (x, (*[slice(None)] * (dim % x.dim()), index)), {})


def _write(mode: Mode, x: Tensor, index: Index, value: Any, accumulate: bool, operation: str) -> Tensor:
    mode.regions.check_write(index.selection.fact.within, operation)
    updated = put(x, index, value, accumulate=accumulate)
    x[index.basic].copy_(updated)
    mode.facts.written(x)
    return x


@handles(Tensor.__setitem__)
def _setitem(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, key, value = args
    items = key if isinstance(key, tuple) else (key,)
    if isinstance(x, Rows) or not any(isinstance(leaf, Rows) for leaf in (*items, value)):
        if isinstance(key, Tensor) and key.dtype is torch.bool and not isinstance(x, Rows) and mode.regions.running:
            mode.regions.check_write(mode.facts.of(key).within, "an assignment")
            x[key] = value
            mode.facts.written(x)
            return x
        return NotImplemented
    index = parse_index(x, key, mode.select)
    if index is None:
        raise SelectionError("selected rows are assigned by another index than their selection")
    _write(mode, x, index, value, False, "an assignment")
    return None


def _index_put_as(in_place: bool) -> Handler:
    def handler(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, key, value = args[:3]
        accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        index = None if isinstance(x, Rows) else parse_index(x, tuple(key), mode.select)
        if index is None or not index.dims:
            return NotImplemented
        if in_place:
            return _write(mode, x, index, value, accumulate, "index_put_")
        return put(x, index, value, accumulate=accumulate)

    return handler


def _index_add_as(in_place: bool, accumulate: bool) -> Handler:
    def handler(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = dict(zip(("self", "dim", "index", "source", "alpha"), args, strict=False)) | kwargs
        x, dim, places, source = (arguments.get(name) for name in ("self", "dim", "index", "source"))
        assert isinstance(x, Tensor) and isinstance(dim, int)
        if isinstance(x, Rows) or not isinstance(places, Rows):
            return NotImplemented
        index = parse_index(x, (*[slice(None)] * (dim % x.dim()), places), mode.select)
        if index is None:
            raise SelectionError(
                "rows are added by another index than their selection; use index_add_ with their selection"
            )
        value = source if arguments.get("alpha", 1) == 1 else source * arguments["alpha"]
        if not isinstance(value, Rows):
            raise SelectionError("a tensor that is not of the selected rows is added to them")
        if in_place:
            return _write(mode, x, index, value, accumulate, "index_add_")
        return put(x, index, value, accumulate=accumulate)

    return handler


for _place in (True, False):
    _suffix = "_" if _place else ""
    for _owner in (Tensor, torch):
        for _stem, _sums in (("index_add", True), ("index_copy", False)):
            if hasattr(_owner, _stem + _suffix):
                CALLS[getattr(_owner, _stem + _suffix)] = _index_add_as(_place, _sums)
        if hasattr(_owner, "index_put" + _suffix):
            CALLS[getattr(_owner, "index_put" + _suffix)] = _index_put_as(_place)


@handles(Tensor.masked_scatter_, Tensor.masked_scatter, torch.masked_scatter)
def _masked_scatter(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(arg, Rows) for arg in args):
        raise SelectionError("masked_scatter takes selected rows in their order; assign them: x[mask] = rows")
    return NotImplemented


@handles(_getter("shape"), Tensor.size)
def _shape(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if isinstance(x, ExpertNumber):
        return torch.Size([1] * x.__dict__["rank"])
    if not isinstance(x, Rows):
        return NotImplemented
    sizes = list(x.data_.shape)
    sizes[x.pos : x.pos + x.grid] = [count_of(x.selection)]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return torch.Size(sizes) if dim is None else sizes[dim]


@handles(Tensor.numel, Tensor.nelement, Tensor.__len__)
def _numel(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Rows):
        return NotImplemented
    # Only ever compared with zero, so the other factors do not matter unless one is zero itself.
    return count_of(args[0].selection)


@handles(Tensor.dim, Tensor.ndimension, _getter("ndim"))
def _rank(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].data_.dim() - args[0].grid + 1 if isinstance(args[0], Rows) else NotImplemented


def _property(name: str) -> None:
    getter = _getter(name)

    def handler(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(args[0].data_, name) if isinstance(args[0], Rows) else NotImplemented

    CALLS[getter] = handler


for _name in ("dtype", "device", "requires_grad", "is_cuda", "layout", "is_sparse", "is_quantized", "is_meta"):
    _property(_name)


@handles(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex)
def _kind(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].data_.is_floating_point() if isinstance(args[0], Rows) else NotImplemented


@handles(Tensor.__iter__)
def _iterate(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Rows):
        return NotImplemented
    numbers, rank = _hit(args[0])
    return _hit_loop(mode, args[0], [ExpertNumber.make(number, rank) for number in numbers])


@handles(Tensor.tolist)
def _listed(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Rows):
        return NotImplemented
    numbers, rank = _hit(args[0])
    return _hit_loop(mode, args[0], [[number] if rank else number for number in numbers])


def _hit(rows: Rows) -> tuple[list[int], int]:
    """All numbers that a loop over ``rows`` may iterate over, and their rank."""
    mask = rows.selection.mask
    fact = rows.selection.fact
    if rows.coordinates is None or mask.dim() != 1 or fact.reduces is None or type(mask.shape[0]) is not int:
        raise SelectionError(
            "selected rows are iterated over; that is possible only for the numbers of what was chosen at all "
            "(counts.nonzero(), where counts are sums over masks), since these are known"
        )
    return list(range(mask.shape[0])), rows.data_.dim() - rows.grid


def _hit_loop(mode: Mode, rows: Rows, items: list[Any]) -> Iterator[Any]:
    assert rows.selection.fact.reduces is not None
    key, dims = rows.selection.fact.reduces
    return mode.regions.loop([("select", key, dims[0], number) for number in range(len(items))], iter(items))


@handles(Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.is_nonzero)
def _truth(mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if isinstance(x, (Rows, ExpertNumber)):
        return NotImplemented
    checked = truth_without_raising() if x.dtype is torch.bool else None
    if checked is not None:
        return mode.skip_check(*checked)
    fact = mode.facts.of(x)
    if fact.reduces is None or fact.reduces[1] or x.dim():
        condition = _none_of(fact.key)
        return NotImplemented if condition is None else mode.regions.enter_branch(condition, False)
    return mode.regions.enter_branch(fact.reduces[0], True)


def _none_of(key: Any) -> Any:
    """The key of the mask if ``key`` is that of ``mask.sum() == 0`` or ``~mask.any()``."""
    if isinstance(key, tuple) and len(key) == 3 and says_any(key[0], _number(key[2])) is False:
        inner = key[1]
        if isinstance(inner, tuple) and inner[0] == "any" and inner[2] == ():
            return inner[1]
    return None


def _number(text: Any) -> Any:
    return int(text) if isinstance(text, str) and text.lstrip("-").isdigit() else None
