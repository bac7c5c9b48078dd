"""Makes loaders of global batches (:mod:`.loader`), and checks what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import default_collate

from autopar.errors import InputMismatchError, OptionsError
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
