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


def turns(members: Sequence[tuple[int, Member]], bytes_of: Callable[[Member], int]) -> list[tuple[int, list[Member]]]:
    """``members``, each with the position of its parameter group, in turns of one group that have at most the bytes of
    the largest member; their order is kept."""
    capacity = max((bytes_of(member) for _, member in members), default=0)
    found: list[tuple[int, list[Member]]] = []
    filled = 0
    for group, member in members:
        if not found or found[-1][0] != group or filled + bytes_of(member) > capacity:
            found.append((group, []))
            filled = 0
        found[-1][1].append(member)
        filled += bytes_of(member)
    return found


def visit(optimizer: torch.optim.Optimizer, shards: Iterable[torch.Tensor]) -> None:
    """Runs one update of ``shards``, all that ``optimizer`` has, with their state on the device, and copies that back
    to the same host memory, which the outer optimizer refers to. A shard without a gradient keeps its state."""
    moved = [shard for shard in shards if shard.grad is not None]
    if not moved:
        return
    resting: dict[torch.Tensor, State] = {shard: optimizer.state.get(shard, {}) for shard in moved}
    for shard, state in resting.items():
        if state:
            optimizer.state[shard] = _on_device(state, shard.device)
    optimizer.step()
    for shard, state in resting.items():
        optimizer.state[shard] = in_host(_copied_back(optimizer.state[shard], state))


def in_host(state: State) -> State:
    """Moves the tensors of a parameter's state to host memory, which is pinned for those from a device."""

    def move(value: torch.Tensor) -> torch.Tensor:
        return value if value.device.type == "cpu" else value.cpu().pin_memory()

    return {key: move(value) if _moves(value) else value for key, value in state.items()}


def _copied_back(updated: State, resting: State) -> State:
    """``updated`` in the memory of ``resting``, where that has it."""

    def copied(key: str, value: Any) -> Any:
        place = resting.get(key)
        both = isinstance(place, torch.Tensor) and isinstance(value, torch.Tensor)
        return place.copy_(value) if both else value

    return {key: copied(key, value) for key, value in updated.items()}


def _on_device(state: State, device: torch.device) -> State:
    """Copies the tensors of a parameter's state to ``device``, really so where that is a processor, as saved
    activations are; scalars, such as the count of steps, stay."""

    def move(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, non_blocking=True, copy=True)

    return {key: move(value) if _moves(value) else value for key, value in state.items()}


def _moves(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
