"""Counts the live bytes of tensors, storage by storage as they are allocated and freed.

It sees everything that passes torch's dispatcher: results of operations and buffers of collectives, but not memory that
a kernel allocates internally. For meta tensors it counts the bytes of real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.tensors import storage_key
from autopar.torch_internals.trees import tree_leaves

from .live_bytes import Life, LiveBytes
from .remembered_results import RememberedResults


class StorageMeter(LiveBytes, TorchDispatchMode):
    """Counts while active. ``peak``: the most bytes live at once, including those of ``given`` tensors. Once a tensor
    of a GPU was counted, meta tensors are not: beside fake ones they only help to find layouts."""

    def __init__(self, given: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._lives: dict[int, Life] = {}
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
        life = self._lives[key] = self.begin(storage.nbytes())
        life.watch = weakref.ref(storage, partial(self._gone, key, life))

    def _gone(self, key: int, life: Life, _: object) -> None:
        self.end(life)
        if self._lives.get(key) is life:
            del self._lives[key]

    def life(self, tensor: torch.Tensor) -> Life | None:
        """The record of a tensor's storage, to ask :meth:`at_peak` later."""
        return self._lives.get(storage_key(tensor.untyped_storage()))

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
