"""Counts the live bytes of tensors, storage by storage as they are allocated and freed.

It sees everything that passes torch's dispatcher: results of operations and buffers of collectives, but not memory that
a kernel allocates internally. For meta tensors it counts the bytes of real ones.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.tensors import storage_key
from autopar.torch_internals.trees import tree_leaves

from .remembered_results import RememberedResults


@dataclass
class _Life:
    """A storage of ``nbytes``, live from event ``born`` to event ``died`` (-1: still live)."""

    nbytes: int
    born: int
    died: int = -1
    watch: Any = field(default=None, repr=False)


class StorageMeter(TorchDispatchMode):
    """Counts while active. ``peak``: the most bytes live at once, including those of ``given`` tensors. Once a tensor
    of a GPU was counted, meta tensors are not: beside fake ones they only help to find layouts."""

    def __init__(self, given: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = self.events = self.peak_event = 0
        self._rises: list[tuple[int, int]] = []
        self._lives: dict[int, _Life] = {}
        self._ended: list[_Life] = []
        self._counts_meta = True
        self._results = RememberedResults()
        for tensor in given:
            self.see(tensor)

    def see(self, tensor: torch.Tensor) -> None:
        """Counts the storage of ``tensor``, if it is not counted yet."""
        kind = tensor.device.type
        self._counts_meta = self._counts_meta and kind in ("meta", "cpu")
        if kind == "meta" and not self._counts_meta:
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._lives or not storage.nbytes():
            return
        self.events += 1
        life = _Life(storage.nbytes(), self.events)
        self._lives[key] = life
        life.watch = weakref.ref(storage, partial(self._gone, key, life))
        self.now += life.nbytes
        self._rises.append((self.events, self.now))
        if self.now > self.peak:
            self.peak, self.peak_event = self.now, self.events

    def _gone(self, key: int, life: _Life, _: object) -> None:
        self.events += 1
        life.died = self.events
        self.now -= life.nbytes
        if self._lives.get(key) is life:
            del self._lives[key]

    def peak_between(self, begin: int, end: int) -> int:
        """The most bytes live after any allocation from event ``begin`` to before event ``end``; 0 without one."""
        first, last = (bisect_left(self._rises, (event, 0)) for event in (begin, end))
        return max((held for _, held in self._rises[first:last]), default=0)

    def life(self, tensor: torch.Tensor) -> _Life | None:
        """The record of a tensor's storage, to ask :meth:`at_peak` later."""
        return self._lives.get(storage_key(tensor.untyped_storage()))

    def at_peak(self, life: _Life | None) -> int:
        """Bytes of a storage if it was live at the peak, else 0."""
        if life is None or life.born > self.peak_event or 0 <= life.died <= self.peak_event:
            return 0
        return life.nbytes

    @staticmethod
    def memory_of(tensor: object) -> tuple[int, int] | None:
        """A number that identifies the storage of a tensor, and its bytes; None for what is not one."""
        if not isinstance(tensor, torch.Tensor):
            return None
        storage = tensor.untyped_storage()
        return storage_key(storage), storage.nbytes()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = self._results.call(function, args, kwargs or {})
        if isinstance(result, torch.Tensor):
            self.see(result)
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result
