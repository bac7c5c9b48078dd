"""Optimizer state on a local disk: files that pass through a few aligned buffers, past the page cache.

Each process has a folder of its own in ``$AUTOPAR_OFFLOAD`` (otherwise the system's folder for temporary files). The
files are scratch: a checkpoint copies what is in them, nothing is ever read from those of another process, and the
folder goes when the process ends. A process that is killed leaves its folder behind; the next one on the host that
finds its lock free removes it.

Files are read and written by ``preadv`` and ``pwritev`` with ``O_DIRECT``, in threads: the interpreter is free
meanwhile, and a queue of a few large requests is enough for the bandwidth of a disk. io_uring (PyPI has ``liburing``)
saves system calls, of which there are few here, and containers often forbid it. Where a file system knows no
``O_DIRECT``, the page cache is asked to forget what was moved.

What a user reads of the state (checkpoints do) are tensors mapped to the files. The kernel keeps them and direct reads
and writes consistent, as long as nobody writes to them during an update.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError

# The environment variable that names the folder.
FOLDER = "AUTOPAR_OFFLOAD"
# What direct reads and writes are aligned to: the largest logical block of today's disks.
BLOCK = 4096
# The first element and the one after the last. All but the last of a tensor begin and end at a block.
Piece = tuple[int, int]
_PREFIX, _LOCK = "autopar-offload-", "lock"


def offload_folder() -> Path:
    """Where the folders of processes are made."""
    return Path(os.environ.get(FOLDER) or tempfile.gettempdir())


@cache
def _own_folder(base: Path, process: int) -> Path:
    """The folder of this process in ``base``, which it removes when it ends."""
    prefix = f"{_PREFIX}{platform.node()}-"
    with _explained(base, "make a folder in"):
        remove_stale(base)
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}{process}-", dir=base))
        lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under this name it is seen by others, who find it locked.
        folder = made.rename(base / made.name.removeprefix("."))
    weakref.finalize(_KEPT, _remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    """Removes the folder of ``process``. A fork of it that ends leaves it alone."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


class _Kept:
    """What lives as long as the process does."""


_KEPT = _Kept()


def remove_stale(base: Path) -> list[Path]:
    """Removes the folders that processes of this host left in ``base`` when they were killed. Returns them."""
    stale = []
    for folder in base.glob(f"{_PREFIX}{platform.node()}-*"):
        with suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                stale.append(folder)
            finally:
                os.close(lock)
    if stale:
        logging.getLogger("autopar").info("removed %s, left behind by processes that were killed", stale)
    return stale


@contextmanager
def _explained(place: Path, doing: str) -> Iterator[None]:
    """Turns errors of the system into ones that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            base = offload_folder()
            free = shutil.disk_usage(base).free if base.is_dir() else 0
            advice = (
                f"the disk is full ({free} bytes are free): free some of it, set ${FOLDER} to a folder of a larger "
                "one, or lower nvme_bytes in the cluster's [device] table, so that plans put less there"
            )
        else:
            advice = f"{error.strerror}: set ${FOLDER} to a folder of a local disk that this process may write to"
        raise AutoparError(
            f"optimizer state rests on a local disk, but this process cannot {doing} {place}: {advice}"
        ) from error


def _aligned(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


class Buffer:
    """Aligned memory that a file is read into and written from. It grows as needed."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def of(self, count: int) -> mmap.mmap:
        """Memory of at least ``count`` bytes."""
        if self._memory is None or len(self._memory) < count:
            self._memory = mmap.mmap(-1, max(_aligned(count), BLOCK))
        return self._memory


class DiskState:
    """The state tensors of one parameter, not empty, in a file of this process. ``tensors``: mapped to it, by key."""

    def __init__(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Makes the file. Raises :class:`AutoparError` if there is no room, or no permission."""
        self.offsets: dict[str, int] = {}
        self.shapes = dict(shapes)
        self.bytes = 0
        for key, (shape, dtype) in shapes.items():
            self.offsets[key] = self.bytes
            self.bytes += _aligned(shape.numel() * dtype.itemsize)
        folder = _own_folder(offload_folder(), os.getpid())
        with _explained(folder, "write to"):
            made, name = tempfile.mkstemp(dir=folder)
            try:
                os.posix_fallocate(made, 0, self.bytes)
            except OSError:
                os.unlink(name)
                raise
            finally:
                os.close(made)
            self.path = Path(name)
            self._file, self._direct = _opened(name)
        weakref.finalize(self, _close, self._file, name, os.getpid())
        self.tensors = self._views(torch.from_file(name, shared=True, size=self.bytes, dtype=torch.uint8))

    def _views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors in ``memory``, which is laid out like the file."""
        views = {}
        for key, (shape, dtype) in self.shapes.items():
            begin = self.offsets[key]
            views[key] = memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return views

    def views(self, buffer: Buffer, piece: Piece) -> dict[str, torch.Tensor]:
        """The elements ``piece`` of each state tensor in a buffer, flat; one after the other, each in whole blocks."""
        spans = self._spans(piece)
        count = sum(_aligned(length) for _, length in spans)
        memory = torch.frombuffer(buffer.of(count), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
        views, place = {}, 0
        for (key, (_, dtype)), (_, length) in zip(self.shapes.items(), spans, strict=True):
            views[key] = memory[place : place + length].view(dtype)
            place += _aligned(length)
        return views

    def _spans(self, piece: Piece) -> list[tuple[int, int]]:
        """Where in the file the elements ``piece`` of each tensor are: the first byte and the number of bytes."""
        spans = []
        for key, (shape, dtype) in self.shapes.items():
            begin, end = (min(index, shape.numel()) * dtype.itemsize for index in piece)
            spans.append((self.offsets[key] + begin, end - begin))
        return spans

    def read(self, buffer: Buffer, piece: Piece) -> None:
        """Reads the elements ``piece`` into ``buffer``."""
        with _explained(self.path, "read"):
            self._move(os.preadv, buffer, piece)

    def write(self, buffer: Buffer, piece: Piece) -> None:
        """Writes the elements ``piece`` from ``buffer``."""
        with _explained(self.path, "write"):
            self._move(os.pwritev, buffer, piece)

    def _move(self, move: Callable[[int, list[Any], int], int], buffer: Buffer, piece: Piece) -> None:
        spans = [(begin, _aligned(length)) for begin, length in self._spans(piece)]
        memory, place = memoryview(buffer.of(sum(length for _, length in spans))), 0
        for begin, length in spans:
            done = 0
            while done < length:
                moved = move(self._file, [memory[place + done : place + length]], begin + done)
                if moved <= 0:
                    raise OSError(errno.EIO, f"the file ends after {begin + done} of {self.bytes} bytes")
                done += moved
            if not self._direct:
                os.posix_fadvise(self._file, begin, length, os.POSIX_FADV_DONTNEED)
            place += length


def _opened(name: str) -> tuple[int, bool]:
    """A file for direct reads and writes, or one of the page cache where the file system has no such; and which."""
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(name, os.O_RDWR), False


def _close(file: int, name: str, process: int) -> None:
    os.close(file)
    if os.getpid() == process:
        with suppress(OSError):
            os.unlink(name)
