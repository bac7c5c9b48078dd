"""Optimizer state that rests in host memory and is on the device while it is updated, a turn after the other.

The parameters of a turn are updated together: as many as have no more state than the largest parameter alone, so that
turns take no more memory than one parameter each would, and a model's many small parameters not a step of an optimizer
each, which takes the interpreter as long as it takes to move some hundred thousand elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

# An optimizer's state of one parameter: tensors and scalars by name.
State = dict[str, Any]
Member = TypeVar("Member")
# Bytes that tensors begin at multiples of: a cache line, and what vectors of any processor or GPU ask for.
ALIGNMENT = 64


def turns(members: Sequence[tuple[int, Member]], bytes_of: Callable[[Member], int]) -> list[tuple[int, list[Member]]]:
    """``members``, each with the position of its parameter group, in turns of one group that have at most the bytes of
    its largest member, aligned; their order is kept. Other groups may have less state for each byte."""
    sizes = [_aligned(bytes_of(member)) for _, member in members]
    largest: dict[int, int] = {}
    for (group, _), size in zip(members, sizes, strict=True):
        largest[group] = max(largest.get(group, 0), size)
    found: list[tuple[int, list[Member]]] = []
    filled = 0
    for (group, member), size in zip(members, sizes, strict=True):
        if not found or found[-1][0] != group or filled + size > largest[group]:
            found.append((group, []))
            filled = 0
        found[-1][1].append(member)
        filled += size
    return found


def visit_all(visits: Sequence[tuple[torch.optim.Optimizer, Sequence[torch.Tensor]]]) -> None:
    """Updates the shards of each optimizer, which are all that it has, a turn after the other: with their state on the
    device, which is then copied back to the same host memory; the outer optimizer refers to that. A shard without a
    gradient keeps its state."""
    moved = [(optimizer, [shard for shard in shards if shard.grad is not None]) for optimizer, shards in visits]
    turns = [(optimizer, {shard: optimizer.state.get(shard, {}) for shard in shards}) for optimizer, shards in moved]
    room = _Room(max((_room_bytes(resting.values()) for _, resting in turns), default=0))
    for optimizer, resting in turns:
        if not resting:
            continue
        room.empty()
        for shard, state in resting.items():
            if state:
                optimizer.state[shard] = {k: room.copy(v, shard.device) if _moves(v) else v for k, v in state.items()}
        optimizer.step()
        for shard, state in resting.items():
            optimizer.state[shard] = in_host(_copied_back(optimizer.state[shard], state))


class _Room:
    """Memory of the device for the state of each turn, allocated once a step: for a processor, to free memory and to
    touch it anew takes longer than the copies."""

    def __init__(self, size: int) -> None:
        self.size, self.filled = size, 0
        self.memory: torch.Tensor | None = None

    def empty(self) -> None:
        self.filled = 0

    def copy(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``value`` on ``device``; a copy even where that is a processor, as saved activations are."""
        if not value.is_contiguous():
            return value.to(device, non_blocking=True, copy=True)
        if self.memory is None:
            self.memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        place = self.memory[self.filled : self.filled + value.nbytes].view(value.dtype).view(value.shape)
        self.filled += _aligned(value.nbytes)
        return place.copy_(value, non_blocking=True)


def _room_bytes(states: Iterable[State]) -> int:
    values = (value for state in states for value in state.values() if _moves(value))
    return sum(_aligned(value.nbytes) for value in values if value.is_contiguous())


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def in_host(state: State) -> State:
    """Moves the tensors of a parameter's state to host memory, which is pinned for those from a device."""

    def move(value: torch.Tensor) -> torch.Tensor:
        return value if value.device.type == "cpu" else value.cpu().pin_memory()

    return {key: move(value) if _moves(value) else value for key, value in state.items()}


def _copied_back(updated: State, resting: State) -> State:
    """``updated`` in the memory of ``resting``, where that has it."""

    def copied(key: str, value: Any) -> Any:
        place = resting.get(key)
        if isinstance(place, torch.Tensor) and isinstance(value, torch.Tensor):
            return place.copy_(value)
        return value

    return {key: copied(key, value) for key, value in updated.items()}


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
