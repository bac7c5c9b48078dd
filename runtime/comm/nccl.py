"""Collectives of NCCL and other backends, whose own forms are the fastest; with the interface of
:mod:`autopar.runtime.comm.gloo`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.runtime.torch_internals.collectives import all_gather_single, reduce_scatter_single

from .gloo import Finish
from .groups import AxisGroup

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _reduction(op: str, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
    """torch's reduction for ``op``. Booleans are reduced as bytes: any for sum and max, all for min and product.
    Integers are not averaged."""
    if dtype == torch.bool:
        return _OPS["max" if op in ("sum", "max", "avg") else "min"]
    return _OPS["sum" if op == "avg" and not dtype.is_floating_point else op]


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _finish(work: dist.Work | None, result: torch.Tensor, kept: torch.Tensor) -> Finish:
    """Waits for ``work``. ``kept``: a tensor that the backend still reads and that must live until the work is done."""

    def finish(kept: torch.Tensor = kept) -> torch.Tensor:
        if work is not None:
            work.wait()
        return result

    return finish


def all_to_all(send: torch.Tensor, group: AxisGroup) -> Finish:
    """As :func:`autopar.runtime.comm.gloo.all_to_all`."""
    receive = torch.empty_like(send)
    if group.imagined:
        return _finish(None, receive, send)
    work = dist.all_to_all_single(_wire(receive), _wire(send), group=group.group, async_op=True)
    return _finish(work, receive, send)


def all_to_all_uneven(send: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: AxisGroup) -> Finish:
    """As :func:`autopar.runtime.comm.gloo.all_to_all_uneven`."""
    receive = send.new_empty((sum(receives), *send.shape[1:]))
    sizes = list(receives), list(sends)
    work = dist.all_to_all_single(_wire(receive), _wire(send), *sizes, group=group.group, async_op=True)
    return _finish(work, receive, send)


def all_gather(piece: torch.Tensor, group: AxisGroup) -> Finish:
    """As :func:`autopar.runtime.comm.gloo.all_gather`."""
    receive = piece.new_empty((group.size, *piece.shape))
    if group.imagined:
        return _finish(None, receive, piece)
    work = all_gather_single(_wire(receive).view(-1), _wire(piece).view(-1), group=group.group, async_op=True)
    return _finish(work, receive, piece)


def reduce_scatter(send: torch.Tensor, op: str, group: AxisGroup) -> Finish:
    """As :func:`autopar.runtime.comm.gloo.reduce_scatter`."""
    receive = send.new_empty(send.shape[1:])
    if group.imagined:
        return _finish(None, receive, send)
    reduction = _reduction(op, send.dtype)
    work = reduce_scatter_single(
        _wire(receive).view(-1), _wire(send).view(-1), op=reduction, group=group.group, async_op=True
    )
    return _finish(work, receive, send)


def all_reduce(tensor: torch.Tensor, op: str, group: AxisGroup) -> Finish:
    """As :func:`autopar.runtime.comm.gloo.all_reduce`."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    if group.imagined:
        return _finish(None, result, result)
    work = dist.all_reduce(_wire(result), op=_reduction(op, tensor.dtype), group=group.group, async_op=True)
    return _finish(work, result, result)
