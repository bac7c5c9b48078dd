"""Random numbers of a model that runs on many devices: the same whatever the plan.

Almost every operation that draws is, in a program, a draw of :mod:`autopar.ops.random`: its numbers are a function of
the seed, of how many steps were taken before, and of where a number stands in the whole tensor. :class:`RandomState`
is that seed and count, one per parallel module.

What is left (Poisson, binomial, gamma and Dirichlet distributions, draws from a generator of their own) draws the whole
tensor on every rank, and each keeps its part; so all must draw the same. Before a section that has such an operation,
rank 0's generator is copied to all, and afterwards the others get their own back: what ranks draw for themselves
(shuffling, augmentation) stays theirs, and ``torch.manual_seed`` on rank 0 decides what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.ir.program import Section, draws_numbers
from autopar.runtime.comm.groups import MeshGroups

# Two streams of a seed (autopar/ops/random.py); part of what a checkpoint means, so never renumbered.
TRAINING, EVALUATION = 0, 1


def signed_seed(seed: int) -> int:
    """``seed`` as a signed 64-bit integer, which a tensor holds. A process that was not seeded has one of 64 bits
    without a sign; as for torch, the same bits are the same seed."""
    bits = seed & 0xFFFF_FFFF_FFFF_FFFF
    return bits - 2**64 if bits >= 2**63 else bits


@dataclass
class RandomState:
    """What the next call of a model draws is a function of this: ``steps`` counts the calls that train, ``evaluations``
    all others, which draw from a sequence of their own and so do not disturb training."""

    seed: int
    steps: int = 0
    evaluations: int = 0

    def __post_init__(self) -> None:
        self.seed = signed_seed(self.seed)

    def advance(self, trains: bool) -> torch.Tensor:
        """The state of this call, as :mod:`autopar.ops.random` takes it, for a batch from its first sample on; counts
        the call."""
        count = self.steps if trains else self.evaluations
        if trains:
            self.steps += 1
        else:
            self.evaluations += 1
        return torch.tensor([self.seed, TRAINING if trains else EVALUATION, count, 0])


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
