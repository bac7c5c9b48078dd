"""Methods of a parallel module for data loaders that read only the rank's own samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset

from autopar.errors import AutoparError, OptionsError
from autopar.ir.row_shares import rank_shares
from autopar.runtime.calls.kind import leaf_names
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.randomness import RandomState
from autopar.runtime.faults.watch import Watch
from autopar.runtime.inputs.loader import BatchShares, GlobalLoader, Position, Share, StreamShares
from autopar.runtime.inputs.make_loader import (
    as_plain,
    batch_loader,
    check_arguments,
    check_same_batch,
    checked_batch_size,
    stream_loader,
    whole_batches,
)
from autopar.runtime.inputs.rank_local import join
from autopar.runtime.inputs.sampler import GlobalBatchSampler, PartOf, size_of, whole
from autopar.torch_internals.trees import tree_flatten, tree_unflatten

from .padded_batch import padded_batch

# What faults call the loader's exchanges.
_LOADER = "model.dataloader()"


class OwnSamples:
    """A mixin of :class:`~.parallel_module.ParallelModule`, whose attributes it uses."""

    _original: nn.Module
    _groups: MeshGroups
    _exchange: Exchange
    _random: RandomState
    _watch: Watch
    _pad_to: int | None
    _plan: Any

    def from_local(self, *args: Any, **kwargs: Any) -> Any:
        """Joins the samples that each rank read (for example with a ``DistributedSampler``) to the global batch: a dict
        for keyword inputs, a tuple for positional ones, for :meth:`step` and other calls. Collective; needs no plan.

        Each tensor has this rank's samples along dim 0. The batch is a DTensor of the samples of all ranks, one rank
        after the other; ranks may have different numbers of samples. Tensors without dims and non-tensors stay
        unchanged. Inputs that samples share (a mask of the whole batch) are passed separately. Losses are those of one
        process with the whole batch: a mean is over all samples, not a mean of the ranks' means.

        Raises :class:`InputMismatchError`, on every rank, if tensors of ranks differ in anything else.
        """
        return self._join(args, kwargs, 1)

    def _join(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], copies: int) -> Any:
        check_one_form("from_local", args, kwargs)
        leaves, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
        names = leaf_names(self._original, args, kwargs)
        with torch.no_grad():
            joined = join(names, leaves, self._groups, self._exchange, copies)
        positional, keywords = tree_unflatten(joined, spec)
        return positional if args else {name: keywords[name] for name in kwargs}

    def sampler(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> GlobalBatchSampler:
        """The ``batch_sampler`` of a ``DataLoader`` over ``dataset`` (or a number of samples) that reads each sample of
        a global batch of ``batch_size`` on one rank. ``sampler.from_local(...)``, called once for each batch of the
        loader, joins the ranks' samples. ``shuffle``: the order is a function of ``seed`` (default: the model's) and
        ``set_epoch``."""
        return GlobalBatchSampler(
            size_of(dataset),
            batch_size,
            rank=self._exchange.index,
            ranks=len(self._exchange.ranks),
            join=self._join,
            shuffle=shuffle,
            seed=self._loader_seed() if seed is None else seed,
            drop_last=drop_last,
            part=self._own_part,
            weights=self._row_weights,
        )

    def dataloader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        **options: Any,
    ) -> GlobalLoader:
        """A ``DataLoader`` of global batches of ``batch_size`` samples: those of a ``DataLoader`` in one process, of
        which each rank reads its share. What it gives (mappings become dicts) is passed to :meth:`step` or the model as
        it is; iterating is collective.

        Args:
            dataset: of torch's, or anything with ``__len__`` and ``__getitem__``. Of an ``IterableDataset`` every rank
                reads all samples, and collates its own.
            collate_fn: makes a batch of this rank's samples. Token sequences may be of any length: they are padded to
                the longest of all ranks, and to a multiple of ``Options(pad_to=)``.
            shuffle: the order is a function of ``seed`` (default: the model's) and the epoch, which each complete
                iteration increases.
            sampler, batch_sampler: torch's, instead of ``shuffle``; they give the global order, the same on all ranks.
            options: others of ``DataLoader``, such as ``num_workers``.

        Raises :class:`OptionsError` for options of another kind, or that exclude each other.
        """
        own = {"collate_fn": collate_fn, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        check_arguments(dataset, options, **own, sampler=sampler, batch_sampler=batch_sampler)
        ranks, rank = len(self._exchange.ranks), self._exchange.index
        options["collate_fn"] = collate_fn
        if isinstance(dataset, IterableDataset):
            if shuffle or sampler is not None or batch_sampler is not None:
                raise OptionsError("a stream comes in its own order: shuffle it itself, such as stream.shuffle(seed=0)")
            size = checked_batch_size(batch_size)
            shared = StreamShares(dataset, size, drop_last, rank, ranks, self._own_part, self._row_weights)
            return stream_loader(shared, self._finished, options)
        if sampler is not None and shuffle:
            raise OptionsError("shuffle=True and a sampler exclude each other: the sampler gives the order")
        if batch_sampler is not None and (sampler is not None or shuffle or drop_last or batch_size is not None):
            raise OptionsError(
                "a batch_sampler gives whole batches: leave out batch_size, shuffle, sampler and drop_last"
            )
        order = None
        if batch_sampler is None and sampler is None:
            seed = self._loader_seed() if seed is None else seed
            batch_sampler = order = whole_batches(dataset, checked_batch_size(batch_size), shuffle, seed, drop_last)
        elif batch_sampler is None:
            batch_sampler = BatchSampler(sampler, checked_batch_size(batch_size), drop_last)
        position, call = Position(order), lambda: self._watch.call(_LOADER)
        batches = BatchShares(batch_sampler, self._exchange, position, call, self._own_part, self._row_weights)
        return batch_loader(dataset, batches, self._finished, options)

    @property
    def _row_weights(self) -> tuple[int, ...]:
        """The shares in which ranks read a batch: those of the plan, if there is one by now, and it divides rows in
        unequal shares among these ranks."""
        plan = self._plan
        if plan is None or plan.sync is not None:
            return ()
        return rank_shares(plan.stages, plan.mesh, plan.shares)

    @property
    def _own_part(self) -> PartOf:
        """Which samples of a batch this mesh trains on."""
        return whole

    def _loader_seed(self) -> int:
        return self._random.seed

    def padded(self, **batch: Any) -> dict[str, Any]:
        """``batch``, a global one, with its token sequences padded to a multiple of ``Options(pad_to=)`` and with a
        mask of the real positions, as :meth:`dataloader` and :meth:`step` do it; outputs are as long as these."""
        return self._padded_call((), batch)[1]

    def _padded_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a call with a batch that is whole on every rank, padded as :meth:`padded`."""
        if self._pad_to is None:
            return args, kwargs
        return padded_batch(self._original, self._pad_to, args, kwargs)

    def _finished(self, batch: Any, share: Share) -> Any:
        """A whole batch of this rank's share of one."""
        plain = as_plain(batch)
        args, kwargs = ((), plain) if isinstance(plain, dict) else (plain if _is_many(plain) else (plain,), {})

        def everyone(record: bytes) -> list[bytes]:
            records = self._exchange.all_bytes(share.digest + record)
            check_same_batch([each[: len(share.digest)] for each in records], self._exchange)
            return [each[len(share.digest) :] for each in records]

        with self._watch.call(_LOADER):
            named = isinstance(plain, dict)
            args, kwargs = padded_batch(self._original, self._pad_to, tuple(args), kwargs, everyone, named)
            joined = self._join(args, kwargs, share.copies)
        return joined if kwargs or _is_many(plain) else joined[0]


def _is_many(batch: object) -> bool:
    return isinstance(batch, (tuple, list))


def check_one_form(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises :class:`AutoparError` if ``method`` gets both positional and keyword inputs, since it returns either a
    tuple or a dict."""
    if args and kwargs:
        raise AutoparError(f"{method} takes positional inputs or keyword inputs, not both; call it twice")
