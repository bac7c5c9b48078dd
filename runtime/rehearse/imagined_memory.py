"""Imagined tensors, and a meter of their memory that counts as :class:`.StorageMeter` counts that of tensors.

An imagined tensor is what a tensor without data has, and a storage that dies with its last reference: Python's own
reference counts say when, as they do for tensors, and no call goes through torch.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import torch

from autopar.torch_internals.tensors import storage_key

from .live_bytes import Life, LiveBytes


class Kind(NamedTuple):
    """What tensors without data have besides their memory. ``number``: equal for those that are equal, and have
    storages of equal sizes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    number: int

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


class Storage:
    """``nbytes`` of imagined memory. ``life``: once ``meter`` counts it."""

    __slots__ = ("life", "meter", "nbytes")

    def __init__(self, nbytes: int, meter: ImaginedMeter) -> None:
        self.nbytes, self.meter = nbytes, meter
        self.life: Life | None = None

    def __del__(self) -> None:
        if self.life is not None:
            self.meter.end(self.life)


class Imagined:
    """A tensor of a ``kind`` in a ``storage``."""

    __slots__ = ("kind", "storage")

    def __init__(self, kind: Kind, storage: Storage) -> None:
        self.kind, self.storage = kind, storage

    @property
    def nbytes(self) -> int:
        return self.kind.bytes


class ImaginedMeter(LiveBytes):
    """Counts the live bytes of imagined tensors, event by event: the interface of :class:`.StorageMeter`. Storages
    made inside of its ``with`` block are counted when they are made, others when they are seen."""

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False
        self._kinds: dict[tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, int], Kind] = {}

    def __enter__(self) -> ImaginedMeter:
        self._is_inside = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_inside = False

    def kind_of(self, tensor: torch.Tensor) -> Kind:
        """The kind of a tensor without data."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        key = shape, stride, int(tensor.storage_offset()), tensor.dtype, tensor.untyped_storage().nbytes()
        if key not in self._kinds:
            self._kinds[key] = Kind(*key[:4], len(self._kinds))
        return self._kinds[key]

    def imagine(self, tensors: list[torch.Tensor]) -> list[Imagined]:
        """Imagined tensors like these; those that share memory do."""
        storages: dict[int, Storage] = {}
        made: list[Imagined] = []
        for tensor in tensors:
            memory = tensor.untyped_storage()
            key = storage_key(memory)
            if key not in storages:
                storages[key] = self.born(memory.nbytes()) if self._is_inside else Storage(memory.nbytes(), self)
            made.append(Imagined(self.kind_of(tensor), storages[key]))
        return made

    def born(self, nbytes: int) -> Storage:
        """A new storage, which is counted."""
        storage = Storage(nbytes, self)
        self._count(storage)
        return storage

    def see(self, tensor: Imagined) -> None:
        """Counts the storage of ``tensor``, if it is not counted yet."""
        if tensor.storage.life is None:
            self._count(tensor.storage)

    def _count(self, storage: Storage) -> None:
        if storage.nbytes:
            storage.life = self.begin(storage.nbytes)

    def life(self, tensor: Imagined) -> Life | None:
        """The record of a tensor's storage, to ask :meth:`at_peak` later."""
        return tensor.storage.life

    @staticmethod
    def memory_of(tensor: object) -> tuple[int, int] | None:
        """A number that identifies the storage of a tensor, and its bytes; None for what is not one."""
        return (id(tensor.storage), tensor.storage.nbytes) if isinstance(tensor, Imagined) else None
