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

from autopar.runtime.inputs.loader import GlobalLoader, Position
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.torch_internals.trees import tree_map

from .joined_batches import options_of, with_joined_batches


class _Position(Position):
    """That of a loader and its copies. After the last batch of an epoch (``ended``) a state is the beginning of the
    next epoch, also while the last batch is in use."""

    ended = False

    def start(self) -> int:
        self.ended = False
        return super().start()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch + 1, "batches": 0} if self.ended else super().state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.ended = False
        super().load_state_dict(state)


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """Whole batches, as plain tensors, of which this process reads its share; ``stock`` gives the global order, and its
    attributes are this loader's. ``model``: gives the parallel module, when batches are read.

    Each complete iteration is an epoch, which the next one follows. The position is that of the batches given, here or
    by a loader that :meth:`skipping` has made of this one.
    """

    def __init__(self, stock: DataLoader[Any], model: Callable[[], ParallelModule]) -> None:
        self.stock, self.gradient_state = stock, GradientState()
        self._drop_last = stock.drop_last
        self._model = model
        self._kept: GlobalLoader | None = None
        self._position = _Position()
        self._skip: int | None = None

    @classmethod
    def of(
        cls, stock: DataLoader[Any], *, times: int, seed: int, model: Callable[[], ParallelModule]
    ) -> PreparedLoader:
        """That of a loader of batches ``times`` smaller, in the order in which Accelerate's seedable sampler would
        shuffle it in one process. Raises :class:`OptionsError` for a loader of batches that cannot be divided."""
        joined = with_joined_batches(stock, times)
        alone = prepare_data_loader(joined, num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=seed)
        return cls(alone, model)

    def __getattr__(self, name: str) -> Any:
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __len__(self) -> int:
        return max(0, len(self.stock) - (self._skip or 0))

    def __iter__(self) -> Iterator[Any]:
        loader, position = self._loader(), self._position
        if self._skip is not None:
            position.begin = self._skip
        begin = position.start()
        loader.load_state_dict({**loader.state_dict(), "epoch": position.epoch, "batches": begin})
        self.begin()
        try:
            batches = iter(loader)
            following = next(batches, None)
            while following is not None:
                batch, following = following, next(batches, None)
                self.end_of_dataloader = position.ended = following is None
                position.batches += 1
                yield tree_map(_whole, batch)
        finally:
            self._skip = None
            self.end()
        position.load_state_dict({"epoch": position.epoch + 1, "batches": 0})

    def _loader(self) -> GlobalLoader:
        if self._kept is not None:
            return self._kept
        stock, options = self.stock, options_of(self.stock)
        if isinstance(stock.dataset, IterableDataset):
            options |= {"batch_size": stock.batch_size, "drop_last": stock.drop_last}
        else:
            options["batch_sampler"] = stock.batch_sampler
        loader = self._model().dataloader(stock.dataset, **options)
        if options.get("persistent_workers"):
            self._kept = loader
        return loader

    def release(self) -> None:
        """Forgets the model, and ends workers that were kept for further epochs."""
        self._kept = None

    def skipping(self, batches: int) -> PreparedLoader:
        """A loader whose first iteration begins after so many batches. It has the position of this one."""
        other = copy.copy(self)
        other._kept, other._skip = None, batches + (self._skip or 0)
        return other

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration. Another one than the present begins with its first batch, or where
        :meth:`skipping` says."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration continues after the batches that ``state`` counts."""
        self._position.load_state_dict(state)

    @property
    def total_batch_size(self) -> int | None:
        """The number of samples of a global batch."""
        return getattr(self.stock.batch_sampler, "batch_size", self.stock.batch_size)


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.full_tensor()
