"""Makes loaders of global batches (:mod:`.loader`), and checks what they are given."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from autopar.errors import InputMismatchError, OptionsError
from autopar.keywords import check_keywords
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.minority import minority, named

from .loader import BatchShares, CollatedShare, Finish, GlobalLoader, Position, StreamShares
from .sampler import GlobalBatchSampler, size_of


def whole_batches(
    dataset: Sized | int, batch_size: int, shuffle: bool, seed: int, drop_last: bool
) -> GlobalBatchSampler:
    """The batches of one process, in the order of the model's sampler."""

    def not_joined(*_: Any) -> Any:
        raise AssertionError("the loader joins")

    return GlobalBatchSampler(
        size_of(dataset),
        batch_size,
        rank=0,
        ranks=1,
        join=not_joined,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def batch_loader(dataset: Any, shares: BatchShares, finish: Finish, options: Mapping[str, Any]) -> GlobalLoader:
    """A loader of the samples of ``shares``. Raises :class:`OptionsError` for batches out of order."""
    if options.get("num_workers") and not options.get("in_order", True):
        raise OptionsError("in_order=False gives batches in another order on every rank: leave it out")
    return GlobalLoader(finish, shares.position, dataset, batch_sampler=shares, **options)


def stream_loader(shares: StreamShares, finish: Finish, options: Mapping[str, Any]) -> GlobalLoader:
    """A loader of a stream. Raises :class:`OptionsError` for several workers, each of which would read all of it."""
    if options.get("num_workers", 0) > 1:
        raise OptionsError(
            f"num_workers={options['num_workers']} for a stream: each worker would read all of it. Give num_workers=1"
        )
    if options.get("persistent_workers"):
        raise OptionsError("persistent_workers=True for a stream would keep its position: leave it out")
    collate = CollatedShare(options.get("collate_fn") or default_collate)
    return GlobalLoader(finish, Position(), shares, batch_size=None, **{**options, "collate_fn": collate})


def checked_batch_size(batch_size: object) -> int:
    """``batch_size``, if it is one. Raises :class:`OptionsError`."""
    if type(batch_size) is not int or batch_size < 1:
        raise OptionsError(f"batch_size={batch_size!r} is not a number of samples: give that of the global batch")
    return batch_size


# The arguments of torch's loader that ``model.dataloader`` passes on.
_PASSED_ON = tuple(inspect.signature(DataLoader.__init__).parameters)[2:]


def check_arguments(dataset: object, options: Mapping[str, Any], **own: Any) -> None:
    """Checks what ``model.dataloader`` is given: ``own`` arguments and further ``options`` of torch's loader. Raises
    :class:`OptionsError`, which is an :class:`ArgumentError` for arguments that there are none of."""
    check_keywords("dataloader", options, tuple(dict.fromkeys(("dataset", "batch_size", *own, *_PASSED_ON))))
    _check_dataset(dataset)
    for name in ("shuffle", "drop_last"):
        if not isinstance(own[name], bool):
            raise OptionsError(f"{name}={own[name]!r} is not True or False")
    if own["seed"] is not None and type(own["seed"]) is not int:
        raise OptionsError(f"seed={own['seed']!r} is not a whole number, or None for the model's seed")
    if own["collate_fn"] is not None and not callable(own["collate_fn"]):
        raise OptionsError(f"collate_fn={own['collate_fn']!r} is not a function from a list of samples to a batch")
    for name, gives in (("sampler", "indices of samples"), ("batch_sampler", "lists of indices of samples")):
        if own[name] is not None and not isinstance(own[name], Iterable):
            raise OptionsError(
                f"{name}={own[name]!r} cannot be iterated over: it gives {gives}, as torch's samplers do"
            )
    workers = options.get("num_workers", 0)
    if type(workers) is not int or workers < 0:
        raise OptionsError(f"num_workers={workers!r} is not a number of processes, 0 or more")


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, DataLoader):
        raise OptionsError(
            "the dataset is a DataLoader, and model.dataloader makes one: give what it reads, loader.dataset, with "
            "batch_size= that of the global batch, and collate_fn= and others as they were given to the loader"
        )
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__getitem__") and not isinstance(dataset, type)):
        return
    if isinstance(dataset, Iterable) and not isinstance(dataset, type):
        raise OptionsError(
            f"the dataset is a {type(dataset).__name__}, which can be iterated over but not indexed: make it a "
            "torch.utils.data.IterableDataset, whose __iter__ begins anew in every epoch, or a list"
        )
    what = f"the class {dataset.__name__}" if isinstance(dataset, type) else repr(dataset)
    raise OptionsError(f"the dataset is {what}: give one with __len__ and __getitem__, or an IterableDataset")


def as_plain(batch: Any) -> Any:
    """``batch`` with dicts for mappings such as those of tokenizers; tuples and lists of these, too."""
    if isinstance(batch, Mapping):
        return {key: as_plain(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(map(as_plain, batch))
    return batch


def check_same_batch(digests: Sequence[bytes], exchange: Exchange) -> None:
    """Raises :class:`InputMismatchError`, on every rank, if ranks took their shares of different batches."""
    odd, others = minority(digests)
    if odd:
        raise InputMismatchError(
            f"{named([exchange.ranks[at] for at in odd])} took the next batch from other samples than "
            f"{named([exchange.ranks[at] for at in others])}: the dataset and its sampler must give the same global "
            "order on every rank. Seed what shuffles alike (generator=torch.Generator().manual_seed(0)), and give all "
            "ranks the same dataset"
        )
