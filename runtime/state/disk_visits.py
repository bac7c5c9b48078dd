"""Updates of parameters whose optimizer state rests on a local disk, in pieces of equal size: while one is updated, the
state of the next is read and that of the one before is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.offload import NVME_BUFFERS, NVME_PIECE

from .disk import Buffer, DiskState, Piece

State = dict[str, Any]


@dataclass(eq=False)
class Visitor:
    """One parameter of ``shape``. ``update(piece, state)`` steps elements of it with their state, flat, which it is
    given on its device, and returns the new one. ``files``: None before the first update; ``others``: what of the
    state is no tensor with dims, and stays."""

    device: torch.device
    shape: torch.Size
    update: Callable[[Piece, State], State]
    files: DiskState | None = None
    others: State = field(default_factory=dict)

    @property
    def resting(self) -> State:
        """The state as users see it."""
        return {**self.others, **(self.files.tensors if self.files is not None else {})}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What is updated at a time; at least one."""
        count = self.shape.numel()
        return tuple((at, min(at + NVME_PIECE, count)) for at in range(0, max(count, 1), NVME_PIECE))

    def put(self, state: State, buffer: Buffer, piece: Piece) -> None:
        """Lays the ``state`` of a piece out in ``buffer``, to be written. Raises :class:`AutoparError` if the disk has
        no room."""
        kept = {key: value for key, value in state.items() if moves(value)}
        shapes = {key: (self.shape, value.dtype) for key, value in kept.items()}
        self._keep({key: value for key, value in state.items() if key not in kept})
        if not kept:
            self.files = None
            return
        if self.files is None or self.files.shapes != shapes:
            self.files = DiskState(shapes)
        for key, place in self.files.views(buffer, piece).items():
            if place.data_ptr() != kept[key].data_ptr():
                place.copy_(kept[key].reshape(-1))

    def _keep(self, others: State) -> None:
        """Every piece counts its own steps; all come to the same. Users have the tensors of the first time."""
        for key, value in others.items():
            before = self.others.get(key)
            if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
                others[key] = before.copy_(value)
        self.others = others


def moves(value: Any) -> bool:
    """Whether a value of the state is moved; scalars, such as the count of steps, stay."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


@dataclass(eq=False)
class _Visit:
    """One piece of one parameter. ``files``: its state before the step, which the first piece may replace; ``others``:
    what it is given of the rest."""

    visitor: Visitor
    piece: Piece
    files: DiskState | None
    others: State


class DiskVisits:
    """The buffers and threads of one optimizer."""

    def __init__(self) -> None:
        self._buffers = [Buffer() for _ in range(NVME_BUFFERS)]
        self._threads = ThreadPoolExecutor(2, "autopar-offload")

    def rest(self, visitor: Visitor, state: State) -> None:
        """Writes ``state`` to the disk as that of ``visitor``."""
        for begin, end in visitor.pieces:
            piece = {key: value.reshape(-1)[begin:end] if moves(value) else value for key, value in state.items()}
            visitor.put(piece, self._buffers[0], (begin, end))
            if visitor.files is not None:
                visitor.files.write(self._buffers[0], (begin, end))

    def step(self, visitors: Sequence[Visitor]) -> None:
        """Updates all ``visitors`` in order. The files hold the new state when this returns."""
        visits = [_Visit(each, piece, each.files, _own(each.others)) for each in visitors for piece in each.pieces]
        reads: dict[int, Future[None]] = {}
        writes: dict[int, Future[None]] = {}
        try:
            for index, visit in enumerate(visits):
                self._read(visits, index, reads, writes)
                self._read(visits, index + 1, reads, writes)
                reads.pop(index).result()
                self._update(visit, index, writes)
        finally:
            for future in (*reads.values(), *writes.values()):
                future.exception()
        for future in writes.values():
            future.result()

    def _update(self, visit: _Visit, index: int, writes: dict[int, Future[None]]) -> None:
        """Updates one piece, and begins to write its state."""
        visitor, buffer = visit.visitor, self._buffers[index % NVME_BUFFERS]
        views = visit.files.views(buffer, visit.piece) if visit.files is not None else {}
        given = visit.others | {key: value.to(visitor.device) for key, value in views.items()}
        visitor.put(visitor.update(visit.piece, given), buffer, visit.piece)
        if visitor.files is not None:
            writes[index] = self._threads.submit(visitor.files.write, buffer, visit.piece)

    def _read(
        self, visits: Sequence[_Visit], index: int, reads: dict[int, Future[None]], writes: dict[int, Future[None]]
    ) -> None:
        """Begins to read the state of a piece, once its buffer has been written from."""
        if index >= len(visits) or index in reads:
            return
        if index - NVME_BUFFERS in writes:
            writes.pop(index - NVME_BUFFERS).result()
        visit, buffer = visits[index], self._buffers[index % NVME_BUFFERS]
        reads[index] = self._threads.submit(visit.files.read, buffer, visit.piece) if visit.files else _done()


def _own(others: State) -> State:
    """A copy: updates count in place."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in others.items()}


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
