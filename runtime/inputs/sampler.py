"""Divides the samples of a data set among ranks: each sample of a global batch is read on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from autopar.errors import OptionsError
from autopar.ir.row_shares import apportioned

Join = Callable[[tuple[Any, ...], Mapping[str, Any], int], Any]


def shares(count: int, ranks: int, weights: tuple[int, ...] = ()) -> tuple[int, list[tuple[int, int]]]:
    """Divides ``count`` samples among ``ranks``. Returns ``(copies, bounds)``; ``bounds[rank]``: start and end of the
    samples that the rank reads. Shares differ by at most one sample, or are about in proportion to ``weights``. If
    there are fewer samples than ranks, each ``copies`` neighbouring ranks read the same samples, so that every rank
    reads some.

    >>> shares(10, 4)
    (1, [(0, 3), (3, 6), (6, 8), (8, 10)])
    >>> shares(3, 4)
    (2, [(0, 2), (0, 2), (2, 3), (2, 3)])
    >>> shares(8, 2, (3, 1))
    (1, [(0, 6), (6, 8)])
    """
    taken = apportioned(count, weights) if weights else ()
    if taken:
        return 1, [(sum(taken[:rank]), sum(taken[: rank + 1])) for rank in range(ranks)]
    parts = max(part for part in range(1, ranks + 1) if ranks % part == 0 and part <= max(count, 1))
    copies, size, longer = ranks // parts, count // parts, count % parts
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return copies, [(starts[rank // copies], starts[rank // copies + 1]) for rank in range(ranks)]


# Of the samples of a batch, counted, the first that some ranks share, and how many.
PartOf = Callable[[int], tuple[int, int]]


def whole(count: int) -> tuple[int, int]:
    """All samples."""
    return 0, count


class GlobalBatchSampler(Sampler[list[int]]):
    """The ``batch_sampler`` of a ``DataLoader``: yields the indices of each global batch that this rank reads, in the
    order of one process. Created by :meth:`ParallelModule.sampler <autopar.ParallelModule.sampler>`.

    :meth:`from_local` joins the ranks' samples, once for each batch of the loader. It counts the batches, so that
    :meth:`state_dict` does not depend on how far the loader's workers have read ahead.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        rank: int,
        ranks: int,
        join: Join,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        part: PartOf = whole,
        weights: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        if type(batch_size) is not int or batch_size < 1:
            raise OptionsError(f"batch_size={batch_size!r} is not a number of samples: give that of the global batch")
        self.batch_size, self.drop_last, self.shuffle, self.seed = batch_size, drop_last, shuffle, seed
        self.epoch = 0
        self._size, self._rank, self._ranks, self._join = size, rank, ranks, join
        self._part, self._weights = part, weights
        if len(self):  # The last batch may be too small for a part of it: an error now rather than after an epoch.
            part(self._count(len(self) - 1))
        self._used = 0
        self._begin = 0
        # Of the batches that were given and not yet joined: their part may have been another then than it is now.
        self._copies: deque[int] = deque()

    def __len__(self) -> int:
        """The number of global batches of an epoch."""
        return self._size // self.batch_size if self.drop_last else -(-self._size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        begin, self._begin = self._begin, 0
        self._used = begin
        order = self._order()
        self._copies.clear()
        for batch in range(begin, len(self)):
            offset, count = self._part(self._count(batch))
            start = batch * self.batch_size + offset
            copies, bounds = shares(count, self._ranks, self._weights)
            first, last = bounds[self._rank]
            self._copies.append(copies)
            yield order[start + first : start + last].tolist()

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self._size, device="cpu")
        source = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
        return torch.randperm(self._size, generator=source, device="cpu")

    def _count(self, batch: int) -> int:
        return min(self.batch_size, self._size - batch * self.batch_size)

    def from_local(self, *args: Any, **kwargs: Any) -> Any:
        """Joins the samples that the loader returned on each rank to the next global batch, as
        :meth:`ParallelModule.from_local <autopar.ParallelModule.from_local>`. Collective."""
        if self._used >= len(self):
            raise OptionsError(
                f"from_local was called for more batches than the {len(self)} of an epoch: call it once for each batch "
                "that the loader gives, and iterate over the loader anew for the next epoch"
            )
        if self._copies:
            copies = self._copies.popleft()
        else:
            copies = shares(self._part(self._count(self._used))[1], self._ranks, self._weights)[0]
        self._used += 1
        return self._join(args, kwargs, copies)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch for the next iterations; shuffling is a function of ``seed`` and epoch."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The epoch, its seed, and how many of its batches were joined; valid for any number of ranks."""
        return {"epoch": self.epoch, "seed": self.seed, "batches": self._used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores ``state``: the next iteration continues after the batches that it counts."""
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._begin = self._used = state["batches"]


def size_of(data: Sized | int) -> int:
    """The number of samples of a data set; ``data`` may be that number itself. Raises :class:`OptionsError` if the data
    set has no length."""
    if isinstance(data, int):
        return data
    try:
        return len(data)
    except TypeError as error:
        raise OptionsError(
            f"a sampler needs to know how many samples there are, and {type(data).__name__} has no len(): of a stream "
            "let each rank read its own part, and join the parts by model.from_local(...)"
        ) from error
