"""The ``collective.*`` operations of a program, bound to the process groups of this rank.

Every communication has the same three steps. *Split* cuts the scattered dim into one piece per rank, padded to the
largest, with pieces as the first dim: shape [n, ...]. The *exchange* is asynchronous, by
:mod:`autopar.runtime.comm.gloo` or :mod:`autopar.runtime.comm.nccl`. *Join* concatenates received pieces [n, ...] along
the gathered dim and removes the padding. Padding is only at the end of the last pieces, because shards follow
``torch.chunk``, unless pieces have unequal ``shares``. Results are contiguous and never share memory with the operand,
except for a group of one device, which communicates nothing and returns the operand itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.placements import chunk_bounds, longest_chunk, take_shard
from autopar.ops.exchanged_experts import EXCHANGES
from autopar.ops.masked import LOCAL_OPS
from autopar.torch_internals.tensors import is_view

from . import gloo
from . import nccl as native
from .gloo import Finish
from .groups import AxisGroup, MeshGroups
from .waiting import WAITING

Axes = Sequence[int]


class Handle:
    """A communication in flight; :meth:`wait`, called once, returns its tensor, or its tensors for a bucketed form."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self) -> Any:
        return WAITING.during(self._finish)


def split_pieces(tensor: torch.Tensor, dim: int, before: int, parts: int, shares: tuple[int, ...] = ()) -> torch.Tensor:
    """``tensor`` as [parts, ...]: piece k of the factor of ``dim`` after ``before``, zero-padded to the largest;
    contiguous."""
    count = tensor.shape[dim] // before
    if shares:
        pieces = tensor.unflatten(dim, (before, count)).split([count // sum(shares) * n for n in shares], dim + 1)
        longest = longest_chunk(count, parts, shares)
        return torch.stack([pad_to(piece, dim + 1, longest).flatten(dim, dim + 1) for piece in pieces])
    length = -(-count // parts)
    if parts * length != count:
        padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, parts * length - count]
        tensor = torch.nn.functional.pad(tensor, padding)
    pieces = tensor.unflatten(dim, (before, parts, length)).movedim(dim + 1, 0)
    return pieces.flatten(dim + 1, dim + 2).contiguous()  # type: ignore[no-any-return]


def join_pieces(pieces: torch.Tensor, dim: int, before: int, size: int, shares: tuple[int, ...] = ()) -> torch.Tensor:
    """The inverse of :func:`split_pieces`: [parts, ...] to a contiguous tensor of length ``size`` along
    ``dim``."""
    parts, length = pieces.shape[0], pieces.shape[dim + 1] // before
    if shares:
        each = pieces.unflatten(dim + 1, (before, length))
        unit = size // before // sum(shares)
        cut = [piece.narrow(dim + 1, 0, unit * n) for piece, n in zip(each, shares, strict=True)]
        return torch.cat(cut, dim + 1).flatten(dim, dim + 1)
    if before == 1 and parts * length != size:
        return _join_padded(pieces, dim, size)
    split = pieces.unflatten(dim + 1, (before, length)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2).contiguous()  # type: ignore[no-any-return]


def _join_padded(pieces: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """As :func:`join_pieces`, of pieces of ``torch.chunk``: full ones, at most one shorter, and empty ones. Of
    thousands of ranks, as few operations as of two: the full ones are copied at once."""
    length = pieces.shape[dim + 1]
    full, rest = divmod(size, length)
    joined = pieces.new_empty((*pieces.shape[1 : dim + 1], size, *pieces.shape[dim + 2 :]))
    joined.narrow(dim, 0, full * length).unflatten(dim, (full, length)).copy_(pieces[:full].movedim(0, dim))
    if rest:
        joined.narrow(dim, full * length, rest).copy_(pieces[full].narrow(dim, 0, rest))
    return joined


def pad_to(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """``tensor`` zero-padded to ``length`` along ``dim``, contiguous."""
    missing = length - tensor.shape[dim]
    if missing:
        tensor = torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing])
    return tensor.contiguous()


def _local_length(size: int, before: int, group: AxisGroup, shares: tuple[int, ...] = ()) -> int:
    """The length of this rank's piece along a dim of global ``size``."""
    return before * chunk_bounds(size // before, group.size, group.index, shares)[1]


def _padded(tensor: torch.Tensor, dim: int, before: int, longest: int) -> torch.Tensor:
    """``tensor`` with ``longest`` elements along the factor of ``dim`` after ``before``, contiguous."""
    if before == 1 or tensor.shape[dim] == before * longest:
        return pad_to(tensor, dim, before * longest)
    return pad_to(tensor.unflatten(dim, (before, -1)), dim + 1, longest).flatten(dim, dim + 1)


def _without_padding(tensor: torch.Tensor, dim: int, before: int, length: int) -> torch.Tensor:
    """The inverse, for a dim of ``length``."""
    if before == 1 or tensor.shape[dim] == length:
        return tensor.narrow(dim, 0, length).contiguous()
    split = tensor.unflatten(dim, (before, -1)).narrow(dim + 1, 0, length // before)
    return split.flatten(dim, dim + 1).contiguous()  # type: ignore[no-any-return]


def _exchange(group: AxisGroup, kind: str, operand: torch.Tensor, op: str = "") -> Callable[..., Any]:
    """The backend's form of the collective ``kind``, which is about to start with ``operand``."""
    if group.listener is not None:
        group.listener.started(kind, op, operand, group)
    backend = gloo if group.backend == "gloo" else native
    form: Callable[..., Any] = getattr(backend, kind)
    return form


def _bucket(
    tensors: Sequence[torch.Tensor], exchange: Callable[[torch.Tensor], Finish], first: int
) -> Callable[[], list[torch.Tensor]]:
    """Sends ``tensors`` through ``exchange`` together, flattened from dim ``first`` on, with one message per dtype. The
    results have the shape [leading dims of the exchange, *tensor.shape[first:]]."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    sent = [
        (members, exchange(torch.cat([tensors[place].flatten(first) for place in members], dim=first)))
        for members in places.values()
    ]

    def finish() -> list[torch.Tensor]:
        results: list[Any] = [None] * len(tensors)
        for members, receive in sent:
            shapes = [tensors[place].shape[first:] for place in members]
            pieces = receive().split([math.prod(shape) for shape in shapes], dim=-1)
            for place, shape, piece in zip(members, shapes, pieces, strict=True):
                results[place] = piece.unflatten(-1, shape) if len(shape) else piece.squeeze(-1)
        return results

    return finish


def _gathered(tensors: Sequence[torch.Tensor], group: AxisGroup) -> Callable[[], list[torch.Tensor]]:
    """Gathers ``tensors`` in one message, as bytes if their dtypes differ; the results have the shape
    [n, *tensor.shape]."""

    def gather(flat: torch.Tensor) -> Finish:
        if not flat.numel():
            return lambda: flat.new_empty((group.size, 0))
        return _exchange(group, "all_gather", flat)(flat, group)  # type: ignore[no-any-return]

    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return _bucket(tensors, gather, 0)
    received = _bucket([tensor.reshape(-1).view(torch.uint8) for tensor in tensors], gather, 0)

    def finish() -> list[torch.Tensor]:
        # A copy of each piece, since a dtype has to begin at a multiple of its size.
        copies = (piece.clone(memory_format=torch.contiguous_format) for piece in received())
        return [c.flatten().view(t.dtype).view(group.size, *t.shape) for c, t in zip(copies, tensors, strict=True)]

    return finish


class Collectives:
    """The operations of :mod:`autopar.ir.program`, bound to ``groups``; named there as
    ``collective.<method>``."""

    def __init__(self, groups: MeshGroups) -> None:
        self.groups = groups

    def _over(self, axes: Axes) -> AxisGroup:
        return self.groups.over(tuple(axes))

    def wait(self, handle: Handle) -> Any:
        """Waits for a started communication. Returns its tensor (bucketed forms: list of tensors)."""
        return handle.wait()

    def all_reduce(self, tensor: torch.Tensor, axes: Axes, op: str = "sum") -> Handle:
        """P(op) -> R."""
        group = self._over(axes)
        if group.size == 1 or tensor.numel() == 0:
            return Handle(lambda: tensor)
        operand = tensor.contiguous()
        return Handle(_exchange(group, "all_reduce", operand, op)(operand, op, group))

    def all_gather(
        self, tensor: torch.Tensor, axes: Axes, dim: int, size: int, before: int = 1, shares: Sequence[int] = ()
    ) -> Handle:
        """S(dim/before:shares) -> R; ``size``: the length of ``dim`` in the result."""
        group = self._over(axes)
        if group.size == 1:
            return Handle(lambda: tensor)
        of_each = tuple(shares)
        padded = _padded(tensor, dim, before, longest_chunk(size // before, group.size, of_each))
        if padded.numel() == 0:
            return Handle(lambda: tensor.new_empty((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])))
        received = _exchange(group, "all_gather", padded)(padded, group)
        return Handle(lambda: join_pieces(received(), dim, before, size, of_each))

    def reduce_scatter(
        self, tensor: torch.Tensor, axes: Axes, op: str, dim: int, before: int = 1, shares: Sequence[int] = ()
    ) -> Handle:
        """P(op) -> S(dim/before:shares)."""
        group, of_each = self._over(axes), tuple(shares)
        if group.size == 1 or tensor.numel() == 0:
            return Handle(lambda: take_shard(tensor, dim, before, group.size, group.index, of_each))
        length = _local_length(tensor.shape[dim], before, group, of_each)
        pieces = split_pieces(tensor, dim, before, group.size, of_each)
        received = _exchange(group, "reduce_scatter", pieces, op)(pieces, op, group)
        return Handle(lambda: _without_padding(received(), dim, before, length))

    def all_to_all(
        self,
        tensor: torch.Tensor,
        axes: Axes,
        gather_dim: int,
        gather_size: int,
        gather_before: int,
        scatter_dim: int,
        scatter_before: int,
        gather_shares: Sequence[int] = (),
        scatter_shares: Sequence[int] = (),
    ) -> Handle:
        """S(gather_dim/gather_before:gather_shares) -> S(scatter_dim/scatter_before:scatter_shares); ``gather_size``:
        the length of ``gather_dim`` in the result."""
        group, gathered, scattered = self._over(axes), tuple(gather_shares), tuple(scatter_shares)
        if group.size == 1:
            return Handle(lambda: tensor)
        length = _local_length(tensor.shape[scatter_dim], scatter_before, group, scattered)
        longest = longest_chunk(gather_size // gather_before, group.size, gathered)
        padded = _padded(tensor, gather_dim, gather_before, longest)
        pieces = split_pieces(padded, scatter_dim, scatter_before, group.size, scattered)
        send = _exchange(group, "all_to_all", pieces) if pieces.numel() else None
        received: Finish = (lambda: pieces) if send is None else send(pieces, group)

        def finish() -> torch.Tensor:
            pieces_of_rank = _without_padding(received(), scatter_dim + 1, scatter_before, length)
            return join_pieces(pieces_of_rank, gather_dim, gather_before, gather_size, gathered)

        return Handle(finish)

    def all_reduce_bucket(self, tensors: Sequence[torch.Tensor], axes: Axes, op: str = "sum") -> Handle:
        """Several all-reduces as one message."""
        group = self._over(axes)
        if group.size == 1:
            return Handle(lambda: list(tensors))
        return Handle(_bucket(tensors, lambda flat: self.all_reduce(flat, axes, op).wait, 0))

    def all_gather_bucket(
        self,
        tensors: Sequence[torch.Tensor],
        axes: Axes,
        dims: Sequence[int],
        sizes: Sequence[int],
        befores: Sequence[int] | None = None,
    ) -> Handle:
        """Several all-gathers as one message."""
        group = self._over(axes)
        if group.size == 1:
            return Handle(lambda: list(tensors))
        where = list(zip(dims, befores or [1] * len(dims), sizes, strict=True))
        padded = [
            pad_to(tensor, dim, -(-size // before // group.size) * before)
            for tensor, (dim, before, size) in zip(tensors, where, strict=True)
        ]
        received = _gathered(padded, group)
        return Handle(lambda: [join_pieces(p, *w) for p, w in zip(received(), where, strict=True)])

    def reduce_scatter_bucket(
        self,
        tensors: Sequence[torch.Tensor],
        axes: Axes,
        op: str,
        dims: Sequence[int],
        befores: Sequence[int] | None = None,
    ) -> Handle:
        """Several reduce-scatters as one message."""
        group = self._over(axes)
        if group.size == 1:
            return Handle(lambda: list(tensors))
        where = list(zip(dims, befores or [1] * len(dims), strict=True))
        lengths = [_local_length(t.shape[d], b, group) for t, (d, b) in zip(tensors, where, strict=True)]
        pieces = [split_pieces(t, d, b, group.size) for t, (d, b) in zip(tensors, where, strict=True)]
        received = _bucket(pieces, lambda flat: _exchange(group, "reduce_scatter", flat, op)(flat, op, group), 1)
        return Handle(
            lambda: [p.narrow(d, 0, n).contiguous() for p, d, n in zip(received(), dims, lengths, strict=True)]
        )

    def slice(
        self, tensor: torch.Tensor, axes: Axes, dim: int, before: int = 1, shares: Sequence[int] = ()
    ) -> torch.Tensor:
        """R -> S(dim/before:shares) without communication; contiguous, and not a view, which would keep the whole
        tensor alive."""
        group = self._over(axes)
        piece = take_shard(tensor, dim, before, group.size, group.index, tuple(shares)).contiguous()
        return piece.clone() if piece.nbytes < tensor.nbytes and is_view(piece) else piece

    def partial(self, tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
        """R -> P(sum): zeros except on the first device of the axes."""
        return tensor if self._over(axes).index == 0 else torch.zeros_like(tensor)

    def exchanged_experts(self, *operands: Any, axes: Axes, starts: Sequence[int]) -> torch.Tensor:
        """A block of experts whose rows travel (:mod:`autopar.ops.exchanged_experts`)."""
        return self._exchanging("exchanged_experts", operands, axes, starts)  # type: ignore[no-any-return]

    def exchanged_experts_backward(self, *operands: Any, axes: Axes, starts: Sequence[int]) -> list[torch.Tensor]:
        """The gradients of such a block."""
        return list(self._exchanging("exchanged_experts_backward", operands, axes, starts))

    def _exchanging(self, name: str, operands: tuple[Any, ...], axes: Axes, starts: Sequence[int]) -> Any:
        group = self._over(axes)
        if group.imagined:
            if group.listener is not None:
                group.listener.started(name, "", operands[name.endswith("backward")], group)
            return LOCAL_OPS[f"autopar.{name.removeprefix('exchanged_')}.default"](*operands, 0)
        block = EXCHANGES[name](*operands, starts)
        message = next(block)
        while True:
            exchange = _exchange(group, "all_to_all_uneven", message.rows)
            arrived = exchange(message.rows, message.sends, message.receives, group)
            try:
                message = block.send(arrived())
            except StopIteration as end:
                return end.value
