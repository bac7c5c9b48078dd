"""The ranks that save or load together, and small messages between them.

They have process groups of their own, of gloo on every device: a save beside training must not come between the
collectives of the training.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.averaging.replica_module import ReplicaModule
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.torch_internals.collectives import world_timeout

Result = TypeVar("Result")
# By purpose and ranks: the world in which a group was created, and the group.
_GROUPS: dict[tuple[str, tuple[int, ...]], tuple[Any, dist.ProcessGroup]] = {}


@dataclass(frozen=True)
class Ranks:
    """``count`` ranks, this one at ``index``; ``group`` is None for one. Each method is collective."""

    group: dist.ProcessGroup | None
    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return self.index == 0

    def all(self, own: Any) -> list[Any]:
        """The values of each rank, which must be picklable, in order."""
        if self.group is None:
            return [own]
        received: list[Any] = [None] * self.count
        dist.all_gather_object(received, own, group=self.group)
        return received

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
            result = function()
        except Exception as error:
            failure, told = error, _told(error)
        everyone = self.all(told)
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
        if failed:
            raise CheckpointError(failed[0])
        return result  # type: ignore[return-value]


def _told(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return str(error)
    return "".join(traceback.format_exception_only(error)).strip()


def ranks_of(model: nn.Module, purpose: str = "saving") -> Ranks:
    """The ranks that have ``model``: those of its mesh, those of all replicas, or all. Collective the first time for a
    ``purpose``; ranks with different purposes do not disturb each other."""
    if not dist.is_initialized():
        return Ranks(None, 0, 1)
    everyone = tuple(range(dist.get_world_size()))
    members = _members(model) if isinstance(model, ParallelModule) else everyone
    if len(members) == 1:
        return Ranks(None, 0, 1)
    return Ranks(_group(purpose, members), members.index(dist.get_rank()), len(members))


def _members(model: ParallelModule) -> tuple[int, ...]:
    return model.ranks if isinstance(model, ReplicaModule) else model.autopar_parts.ranks


def _group(purpose: str, members: tuple[int, ...]) -> dist.ProcessGroup:
    world, group = _GROUPS.get((purpose, members), (None, None))
    if group is None or world is not dist.group.WORLD:
        group = dist.new_group(list(members), world_timeout("gloo"), "gloo", use_local_synchronization=True)
        _GROUPS[purpose, members] = dist.group.WORLD, group
    return group
