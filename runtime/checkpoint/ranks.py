"""The ranks that save or load together, and small messages between them.

They have process groups of their own, of gloo on every device: a save beside training must not come between the
collectives of the training.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.averaging.averaging import Averaging
from autopar.runtime.averaging.replica_module import ReplicaModule
from autopar.runtime.comm.groups import group_in_order
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.torch_internals.gloo_groups import Opened, is_of_connections

Result = TypeVar("Result")
# By purpose and ranks: the world in which a group was created, the group, and its connections.
_GROUPS: dict[tuple[str, tuple[int, ...]], tuple[Any, dist.ProcessGroup, Opened]] = {}
# How many times the patience of replicas a communication of theirs may take: the slowest has to write its files.
# Chosen: ten minutes of a patience of one.
_MOST_WAITS = 10


class LostReplicaError(CheckpointError):
    """A replica left in the middle, and those that are left go on (``Options(sync=...(patience=))``)."""


@dataclass(frozen=True)
class Ranks:
    """``count`` ranks, this one at ``index``; ``group`` is None for one. Each method is collective. ``may_leave``: the
    connections of the group, if ranks may leave it. Whoever notices ends them, so that nobody waits for one that has
    noticed, and nobody takes its next message for the one that is missing; :class:`LostReplicaError` is raised."""

    group: dist.ProcessGroup | None
    index: int
    count: int
    may_leave: Opened | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return self.index == 0

    def all(self, own: Any) -> list[Any]:
        """The values of each rank, which must be picklable, in order."""
        if self.group is None:
            return [own]
        received: list[Any] = [None] * self.count
        with self._noticing():
            dist.all_gather_object(received, own, group=self.group)
        return received

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Within, what communicates."""
        try:
            yield
        except RuntimeError as error:
            if self.may_leave is None or not is_of_connections(error):
                raise
            self.may_leave.interrupt()
            raise _lost(error) from error

    def from_first(self, function: Callable[[], Result]) -> Result:
        """The result of ``function`` on the first rank, on all; it is called there alone. Its error is raised on all
        ranks."""
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                outcome[0] = function()
            except Exception as error:
                failure, outcome[1] = error, _told(error)
        if self.group is not None:
            with self._noticing():
                dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise CheckpointError(f"rank 0: {outcome[1]}")
        result: Result = outcome[0]
        return result

    def together(self, function: Callable[[], Result]) -> Result:
        """The result of ``function`` on each rank, once it has succeeded on all. Raises its error where it failed, and
        :class:`CheckpointError` with the first of the errors elsewhere."""
        failure, told, result = None, None, None
        try:
            with self._noticing():
                result = function()
        except LostReplicaError:
            raise
        except Exception as error:
            failure, told = error, _told(error)
        everyone = self.all(told)
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
        if failed:
            raise CheckpointError(failed[0])
        return result  # type: ignore[return-value]


def _lost(error: RuntimeError) -> LostReplicaError:
    return LostReplicaError(
        "a replica left in the middle of a checkpoint, which may not be there. Training may go on: the next save is of "
        f"the replicas that are left ({_told(error).splitlines()[0]})"
    )


def _told(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


def ranks_of(model: nn.Module, purpose: str = "saving", *, again: bool = False) -> Ranks:
    """The ranks that have ``model``: those of its mesh, those of all replicas that are left, or all. Collective the
    first time for a ``purpose``, and each time for replicas that may leave, unless ``again``: as they were at the call
    before. Ranks with different purposes do not disturb each other."""
    if not dist.is_initialized():
        return Ranks(None, 0, 1)
    averaging = _may_leave(model)
    patience = None if averaging is None else averaging.sync.patience
    if averaging is not None and not again:
        averaging.call_roll()
    everyone = tuple(range(dist.get_world_size()))
    members = _members(model) if isinstance(model, ParallelModule) else everyone
    if averaging is not None and not again and averaging.holds_anywhere(_is_interrupted(members)):
        _forget(members)
    if len(members) == 1:
        return Ranks(None, 0, 1)
    group, opened = _group(purpose, members, patience)
    return Ranks(group, members.index(dist.get_rank()), len(members), None if patience is None else opened)


def anywhere(model: nn.Module, holds: bool) -> bool:
    """Whether ``holds`` on some rank, if replicas may leave, so that ranks of which only some notice that do the same;
    otherwise whether it holds here. Collective."""
    averaging = _may_leave(model)
    return holds if averaging is None else averaging.holds_anywhere(holds)


def _may_leave(model: nn.Module) -> Averaging | None:
    """The exchanges of replicas that may leave; None if there are none."""
    averaging = model.autopar_averaging if isinstance(model, ReplicaModule) else None
    return None if averaging is None or averaging.sync.patience is None else averaging


def _is_interrupted(members: tuple[int, ...]) -> bool:
    return any(opened.interrupted for (_, ranks), (_, _, opened) in _GROUPS.items() if ranks == members)


def _forget(members: tuple[int, ...]) -> None:
    for key in [key for key in _GROUPS if key[1] == members]:
        del _GROUPS[key]


def _members(model: ParallelModule) -> tuple[int, ...]:
    return model.ranks if isinstance(model, ReplicaModule) else model.autopar_parts.ranks


def _group(purpose: str, members: tuple[int, ...], patience: float | None) -> tuple[dist.ProcessGroup, Opened]:
    world, group, opened = _GROUPS.get((purpose, members), (None, None, None))
    if group is None or opened is None or world is not dist.group.WORLD:
        limit = None if patience is None else timedelta(seconds=_MOST_WAITS * patience)
        try:
            with Opened() as opened:
                group = group_in_order(members, "gloo", limit)
        except RuntimeError as error:
            if patience is None or not is_of_connections(error):
                raise
            raise _lost(error) from error
        _GROUPS[purpose, members] = dist.group.WORLD, group, opened
    return group, opened
