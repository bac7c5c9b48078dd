"""Loaders of global batches: of the same samples in the same order, in batches that are some times larger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from autopar.errors import OptionsError

# What a DataLoader is made from, beside the data and the order.
_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


class JoinedBatches(Sampler[list[Any]]):
    """Each ``times`` consecutive batches of ``batch_sampler`` as one. What is left at its end is a smaller batch, or is
    dropped if ``batch_sampler.drop_last``. ``batch_size`` and ``sampler`` are there if ``batch_sampler`` has them;
    a ``sampler`` that is set is its own."""

    def __init__(self, batch_sampler: Iterable[list[Any]], times: int) -> None:
        self.batch_sampler, self.times = batch_sampler, times

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, self.times)):
            if len(group) == self.times or not self.drop_last:
                yield [index for batch in group for index in batch]

    def __len__(self) -> int:
        count = len(self.batch_sampler)  # type: ignore[arg-type]
        return count // self.times if self.drop_last else -(-count // self.times)

    @property
    def drop_last(self) -> bool:
        """Whether a smaller batch at the end is dropped."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    @property
    def batch_size(self) -> int:
        """The number of samples of a joined batch."""
        size: int = self.batch_sampler.batch_size  # type: ignore[attr-defined]
        return size * self.times

    @property
    def sampler(self) -> Any:
        """What gives the samples that are batched."""
        return self.batch_sampler.sampler  # type: ignore[attr-defined]

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Tells it to the batch sampler, if that has an epoch."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)


class ListIndexed(Dataset[Any]):
    """``data``, whose items at a list of indices are taken at once, as ``data[indices]``."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        """Called by DataLoader with the indices of a batch; what this returns is given to its collate function."""
        return self.data[indices]


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What ``loader`` was made from, beside the data and the order."""
    return {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}


def with_joined_batches(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    """``loader`` with batches ``times`` as large; one whose sampler gives batches gets a batch sampler. Raises
    :class:`OptionsError` if it does not say what a sample is."""
    batch_sampler = None if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
    if loader.batch_size is None and batch_sampler is None:
        return _with_batches_of_its_sampler(loader, times)
    if times == 1:
        return loader
    options = options_of(loader)
    if loader.batch_size is None:
        assert batch_sampler is not None
        return DataLoader(loader.dataset, batch_sampler=JoinedBatches(batch_sampler, times), **options)
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return DataLoader(loader.dataset, loader.batch_size * times, drop_last=loader.drop_last, **options)


def _with_batches_of_its_sampler(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    if not isinstance(loader.sampler, BatchSampler):
        raise OptionsError(
            f"DataLoader(batch_size=None) takes each item of {type(loader.dataset).__name__} for a batch, but each "
            "process reads its share of the samples of a global batch: let the dataset give samples, and give "
            "DataLoader(dataset, batch_size=...) their number"
        )
    batches = JoinedBatches(loader.sampler, times) if times > 1 else loader.sampler
    return DataLoader(ListIndexed(loader.dataset), batch_sampler=batches, **options_of(loader))
