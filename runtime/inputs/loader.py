"""A ``DataLoader`` of global batches: each rank reads its share of a batch, and the shares are joined.

The shares are those of :mod:`.sampler`. What a loader has read ahead, in workers too, does not count in its position:
only batches that it has given.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from autopar.runtime.comm.exchange import Exchange

from .sampler import GlobalBatchSampler, PartOf, shares, whole

# Bytes of the hash by which ranks compare which samples they take.
# Chosen: 64 bits do not collide by chance.
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Share:
    """What ranks have to know to join their shares of a batch: how many neighbouring ranks have the same samples, and a
    hash of which samples the whole batch has."""

    copies: int
    digest: bytes


class Finish(Protocol):
    """Joins this rank's share of a batch, as the loader's collate function made it, with those of the others."""

    def __call__(self, batch: Any, share: Share, /) -> Any: ...


class Position:
    """How far a loader is: its ``epoch``, and how many ``batches`` of it were given. ``begin`` are skipped by the next
    iteration. ``order``: what shuffles by a seed and the epoch, if anything does."""

    def __init__(self, order: GlobalBatchSampler | None = None) -> None:
        self.epoch = self.batches = self.begin = 0
        self._order = order

    def start(self) -> int:
        """Begins an iteration; the number of batches to skip."""
        self.batches, self.begin = self.begin, 0
        return self.batches

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration, from its beginning unless it is the present one."""
        if epoch != self.epoch:
            self.load_state_dict({"epoch": epoch, "batches": 0})

    def state_dict(self) -> dict[str, int]:
        """The position, valid for any number of ranks."""
        seed = {} if self._order is None else {"seed": self._order.seed}
        return {"epoch": self.epoch, **seed, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores it: the next iteration continues after the batches that it counts."""
        self.epoch = state["epoch"]
        self.begin = self.batches = state["batches"]
        if self._order is not None:
            self._order.seed = state.get("seed", self._order.seed)


class BatchShares(Sampler[list[int]]):
    """This rank's shares of the batches of ``batches``, any batch sampler of torch's. It must give the same batches on
    every rank: what it draws from torch's generator when it begins is drawn from the first rank's. ``call``: what the
    exchange for that is a part of."""

    def __init__(
        self,
        batches: Iterable[list[int]],
        exchange: Exchange,
        position: Position,
        call: Callable[[], AbstractContextManager[None]] = nullcontext,
        part: PartOf = whole,
        weights: tuple[int, ...] = (),
    ) -> None:
        self.position = position
        self._batches, self._exchange, self._call, self._part = batches, exchange, call, part
        self._weights = weights
        self._shares: deque[Share] = deque()

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        self._shares.clear()
        begin = self.position.start()
        for batch in islice(self._drawn(), begin, None):
            everyones = list(batch)
            first, count = self._part(len(everyones))
            indices = everyones[first : first + count]
            copies, bounds = shares(len(indices), len(self._exchange.ranks), self._weights)
            self._shares.append(Share(copies, _digest(indices)))
            yield indices[slice(*bounds[self._exchange.index])]

    def _drawn(self) -> Iterator[list[int]]:
        """The batches; the first is drawn with the first rank's generator, from which samplers draw seeds."""
        own = torch.get_rng_state()
        with self._call():
            first_ranks = self._exchange.all_bytes(own.numpy().tobytes())[0]
        torch.set_rng_state(torch.frombuffer(bytearray(first_ranks), dtype=torch.uint8))
        iterator = iter(self._batches)
        first = next(iterator, None)
        if own.numpy().tobytes() != first_ranks:  # Ranks that agreed go on in agreement.
            torch.set_rng_state(own)
        if first is not None:
            yield first
            yield from iterator

    def set_epoch(self, epoch: int) -> None:
        """Tells it to what is sampled, if that has an epoch."""
        set_epoch(epoch, self._batches, getattr(self._batches, "sampler", None))

    def next_share(self) -> Share:
        """That of the next batch that the loader gives."""
        self.position.batches += 1
        return self._shares.popleft()


def set_epoch(epoch: int, *sources: Any) -> None:
    """Calls ``set_epoch`` of those that have one."""
    for source in sources:
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)


def _digest(indices: list[Any]) -> bytes:
    return hashlib.sha256(repr(indices).encode()).digest()[:DIGEST_BYTES]


class StreamShares(IterableDataset[tuple[Share, list[Any]]]):
    """This rank's shares of batches of a stream. Every rank reads all samples, which must be the same and in the same
    order, and keeps its own. ``skip``: the batches that the next iteration leaves out."""

    def __init__(
        self,
        stream: Iterable[Any],
        batch_size: int,
        drop_last: bool,
        rank: int,
        ranks: int,
        part: PartOf = whole,
        weights: tuple[int, ...] = (),
    ) -> None:
        self.stream, self.batch_size, self.drop_last = stream, batch_size, drop_last
        self.skip = 0
        self._rank, self._ranks, self._part, self._weights = rank, ranks, part, weights

    def set_epoch(self, epoch: int) -> None:
        """Tells it to the stream, if that has an epoch."""
        set_epoch(epoch, self.stream)

    def __iter__(self) -> Iterator[tuple[Share, list[Any]]]:
        samples = islice(self.stream, self.skip * self.batch_size, None)
        while batch := list(islice(samples, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            first, count = self._part(len(batch))
            batch = batch[first : first + count]
            copies, bounds = shares(count, self._ranks, self._weights)
            yield Share(copies, len(batch).to_bytes(DIGEST_BYTES, "little")), batch[slice(*bounds[self._rank])]


@dataclass(frozen=True)
class CollatedShare:
    """The collate function of a stream's loader: ``collate`` for the samples, which the share accompanies."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, item: tuple[Share, list[Any]]) -> tuple[Share, Any]:
        share, samples = item
        return share, self.collate(samples)


class GlobalLoader(DataLoader[Any]):
    """A ``DataLoader`` whose batches are global ones, joined from the shares that ranks read: ready to be passed to a
    parallel model. Created by :meth:`ParallelModule.dataloader <autopar.ParallelModule.dataloader>`.

    Iterating is collective. Each complete iteration is an epoch, which the next one follows; :meth:`set_epoch` chooses
    another. :meth:`state_dict` counts the batches given.
    """

    def __init__(self, finish: Finish, position: Position, data: Any, **options: Any) -> None:
        super().__init__(data, **options)
        self._finish, self._position = finish, position

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        set_epoch(self._position.epoch, self.dataset, self.batch_sampler)
        if isinstance(self.dataset, StreamShares):
            self.dataset.skip = self._position.start()
        for batch in super().__iter__():
            yield self._given(batch)
        self._position.load_state_dict({"epoch": self._position.epoch + 1, "batches": 0})

    def _given(self, batch: Any) -> Any:
        if isinstance(self.batch_sampler, BatchShares):
            return self._finish(batch, self.batch_sampler.next_share())
        share, samples = batch
        self._position.batches += 1
        return self._finish(samples, share)

    @property
    def epoch(self) -> int:
        """The number of complete iterations, or what :meth:`set_epoch` was given."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration, from its beginning unless it is the present one."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given; valid for any number of ranks."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues after the batches that ``state`` counts."""
        self._position.load_state_dict(state)
