"""Writes beside training: copies a snapshot to host memory, and runs one function in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.content.files_read import ignore_this_thread

from .snapshot import Snapshot

# What the thread is nicer by than the training. Chosen: it gets what the training leaves.
_NICENESS = 10
Buffers = dict[tuple[str, tuple[int, ...]], torch.Tensor]


def copied(snapshot: Snapshot, buffers: Buffers) -> Snapshot:
    """``snapshot`` with its values in host memory: in ``buffers``, which the next copy uses again. They have the values
    when this returns, so that training may go on."""
    used: Buffers = {}
    parts = {}
    for name, part in snapshot.parts.items():
        boxes = []
        for box, value in part.boxes:
            buffer = buffers.get((name, box.offsets))
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                pinned = value.device.type == "cuda"
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            used[name, box.offsets] = buffer.copy_(value, non_blocking=True)
            boxes.append((box, buffer))
        parts[name] = replace(part, boxes=tuple(boxes))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    buffers.clear()
    buffers.update(used)
    return replace(snapshot, parts=parts)


class Background:
    """Runs one function at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Runs ``function`` in a thread, once the one before has ended. Raises its error, as :meth:`wait`."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(function,), name="autopar checkpoint")
        self._thread.start()

    def _run(self, function: Callable[[], object]) -> None:
        ignore_this_thread()
        with contextlib.suppress(OSError, AttributeError):  # Of this thread alone, on Linux.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            function()
        except Exception as error:
            self._failure = error

    @property
    def busy(self) -> bool:
        """Whether the function still runs."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the function to end. Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
