"""One stream of random numbers for the whole mesh: that of rank 0.

An operation that draws (dropout, noise) draws the whole tensor on every rank, and each keeps its part; so all must draw
the same. Before a section that draws, rank 0's generator is copied to all, and afterwards the others get their own
back: what ranks draw for themselves (shuffling, augmentation) stays theirs, and ``torch.manual_seed`` on rank 0 decides
what a model draws, as it does on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from autopar.program import Section, draws_numbers

from .groups import MeshGroups


def draws(section: Section) -> bool:
    """Whether any instruction of ``section`` takes numbers from the generator."""
    return any(map(draws_numbers, section.instructions))


@contextmanager
def shared_random(groups: MeshGroups) -> Iterator[None]:
    """Within, every rank's generator is in the state of rank 0's. Collective."""
    everyone = groups.over(groups.axes)
    own = _state(groups.device)
    if everyone.group is not None:
        shared = own.to(groups.device) if everyone.backend == "nccl" else own.clone()
        dist.broadcast(shared, group=everyone.group, group_src=0)
        _set_state(shared.cpu(), groups.device)
    try:
        yield
    finally:
        if everyone.index != 0:
            _set_state(own, groups.device)


def _state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
