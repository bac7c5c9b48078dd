"""Methods of a parallel module for data loaders that read only the rank's own samples."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.calls.kind import leaf_names
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.randomness import RandomState
from autopar.runtime.inputs.rank_local import join
from autopar.runtime.inputs.sampler import GlobalBatchSampler, size_of
from autopar.torch_internals.trees import tree_flatten, tree_unflatten


class OwnSamples:
    """A mixin of :class:`~.parallel_module.ParallelModule`, whose attributes it uses."""

    _original: nn.Module
    _groups: MeshGroups
    _exchange: Exchange
    _random: RandomState

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
            seed=self._random.seed if seed is None else seed,
            drop_last=drop_last,
        )


def check_one_form(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises :class:`AutoparError` if ``method`` gets both positional and keyword inputs, since it returns either a
    tuple or a dict."""
    if args and kwargs:
        raise AutoparError(f"{method} takes positional inputs or keyword inputs, not both; call it twice")
