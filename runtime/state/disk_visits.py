"""Updates of parameters whose optimizer state rests on a local disk: while one is updated, the state of the next is
read and that of the one before is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from .disk import Buffer, DiskState

# One buffer is read into, one is updated, one is written from; the planner counts as many
# (:data:`autopar.placement.memory_bound.NVME_BUFFERS`).
BUFFERS = 3
State = dict[str, Any]


@dataclass(eq=False)
class Visitor:
    """One parameter, which ``update`` steps with the state that it is given on its device; it returns the new one.
    ``files``: None before the first update; ``others``: what of the state is no tensor with dims, and stays."""

    device: torch.device
    update: Callable[[State], State]
    files: DiskState | None = None
    others: State = field(default_factory=dict)

    @property
    def resting(self) -> State:
        """The state as users see it."""
        return {**self.others, **(self.files.tensors if self.files is not None else {})}

    def put(self, state: State, buffer: Buffer) -> None:
        """Lays ``state`` out in ``buffer``, to be written. Raises :class:`AutoparError` if the disk has no room."""
        kept = {key: value for key, value in state.items() if moves(value)}
        shapes = {key: (value.shape, value.dtype) for key, value in kept.items()}
        self.others = {key: value for key, value in state.items() if key not in kept}
        if not kept:
            self.files = None
            return
        if self.files is None or self.files.shapes != shapes:
            self.files = DiskState(shapes)
        for key, place in self.files.views(buffer).items():
            if place.data_ptr() != kept[key].data_ptr():
                place.copy_(kept[key])


def moves(value: Any) -> bool:
    """Whether a value of the state is moved; scalars, such as the count of steps, stay."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


class DiskVisits:
    """The buffers and threads of one optimizer."""

    def __init__(self) -> None:
        self._buffers = [Buffer() for _ in range(BUFFERS)]
        self._threads = ThreadPoolExecutor(2, "autopar-offload")

    def rest(self, visitor: Visitor, state: State) -> None:
        """Writes ``state`` to the disk as that of ``visitor``."""
        visitor.put(state, self._buffers[0])
        if visitor.files is not None:
            visitor.files.write(self._buffers[0])

    def step(self, visitors: Sequence[Visitor]) -> None:
        """Updates all ``visitors`` in order. The files hold the new state when this returns."""
        reads: dict[int, Future[None]] = {}
        writes: dict[int, Future[None]] = {}
        try:
            for index, visitor in enumerate(visitors):
                self._read(visitors, index, reads, writes)
                self._read(visitors, index + 1, reads, writes)
                buffer = self._buffers[index % BUFFERS]
                reads.pop(index).result()
                given = dict(visitor.others)
                if visitor.files is not None:
                    views = visitor.files.views(buffer)
                    given |= {key: value.to(visitor.device) for key, value in views.items()}
                visitor.put(visitor.update(given), buffer)
                if visitor.files is not None:
                    writes[index] = self._threads.submit(visitor.files.write, buffer)
        finally:
            for future in (*reads.values(), *writes.values()):
                future.exception()
        for future in writes.values():
            future.result()

    def _read(
        self,
        visitors: Sequence[Visitor],
        index: int,
        reads: dict[int, Future[None]],
        writes: dict[int, Future[None]],
    ) -> None:
        """Begins to read the state of a visitor, once its buffer has been written from."""
        if index >= len(visitors) or index in reads:
            return
        if index - BUFFERS in writes:
            writes.pop(index - BUFFERS).result()
        files, buffer = visitors[index].files, self._buffers[index % BUFFERS]
        reads[index] = self._threads.submit(files.read, buffer) if files is not None else _done()


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
