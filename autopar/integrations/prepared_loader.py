"""The loader that :class:`~.accelerate.AutoparAccelerator` prepares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin, prepare_data_loader
from accelerate.state import GradientState
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from autopar.runtime.inputs.loader import GlobalLoader
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.torch_internals.trees import tree_map

# What a DataLoader is made from, beside the data and the order.
_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """Whole batches, as plain tensors, of which this process reads its share; ``stock`` gives the global order, and its
    attributes are this loader's. ``model``: gives the parallel module, when batches are read."""

    def __init__(self, stock: DataLoader[Any], model: Callable[[], ParallelModule]) -> None:
        self.stock, self.gradient_state = stock, GradientState()
        self._drop_last = stock.drop_last
        self._model = model
        self._loader: GlobalLoader | None = None
        self._epoch = self._skip = self._given = 0

    @classmethod
    def of(
        cls, stock: DataLoader[Any], *, times: int, seed: int, model: Callable[[], ParallelModule]
    ) -> PreparedLoader:
        """That of a loader of batches ``times`` smaller, in the order in which Accelerate's seedable sampler would
        shuffle it in one process."""
        if times > 1 and stock.batch_size is not None:
            stock = _with_batches_of(stock, stock.batch_size * times)
        alone = prepare_data_loader(stock, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=seed)
        return cls(alone, model)

    def __getattr__(self, name: str) -> Any:
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __len__(self) -> int:
        return max(0, len(self.stock) - self._skip)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader = self._loader or self._made()
        loader.load_state_dict({**loader.state_dict(), "epoch": self._epoch, "batches": self._skip})
        self._given = self._skip
        self.begin()
        try:
            batches = iter(loader)
            following = next(batches, None)
            while following is not None:
                batch, following = following, next(batches, None)
                self.end_of_dataloader = following is None
                self._given += 1
                yield tree_map(_whole, batch)
        finally:
            self.end()
        self._epoch, self._skip, self._given = self._epoch + 1, 0, 0

    def _made(self) -> GlobalLoader:
        stock = self.stock
        options = {name: getattr(stock, name) for name in _OPTIONS if hasattr(stock, name)}
        if isinstance(stock.dataset, IterableDataset):
            options |= {"batch_size": stock.batch_size, "drop_last": stock.drop_last}
        else:
            options["batch_sampler"] = stock.batch_sampler
        return self._model().dataloader(stock.dataset, **options)

    def skipping(self, batches: int) -> PreparedLoader:
        """A loader that begins after so many batches, once."""
        other = copy.copy(self)
        other._loader, other._skip = None, batches
        return other

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given."""
        return {"epoch": self._epoch, "batches": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues after the batches that ``state`` counts."""
        self._epoch, self._skip = state["epoch"], state["batches"]

    @property
    def total_batch_size(self) -> int | None:
        """The number of samples of a global batch."""
        return getattr(self.stock.batch_sampler, "batch_size", self.stock.batch_size)


def _with_batches_of(stock: DataLoader[Any], size: int) -> DataLoader[Any]:
    options = {name: getattr(stock, name) for name in _OPTIONS if hasattr(stock, name)}
    if not isinstance(stock.dataset, IterableDataset):
        options["sampler"] = stock.sampler
    return DataLoader(stock.dataset, size, drop_last=stock.drop_last, **options)


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.full_tensor()
