"""Random numbers of a model on many devices: the same under every plan.

Almost every operation that draws is a draw of :mod:`autopar.ops.random` in a program: its numbers are a function of the
seed, of the number of earlier steps, and of a number's position in the whole tensor. :class:`RandomState` has this seed
and count, one per parallel module.

Other draws (Poisson, binomial, gamma and Dirichlet distributions, draws from a user's generator) draw the whole tensor
on every rank, and each rank keeps its part, so all must draw the same. Before a section with such an operation rank 0's
generator state is copied to all ranks, and afterwards the others restore their own. So the ranks' own draws (shuffling,
augmentation) are not affected, and ``torch.manual_seed`` on rank 0 determines the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.ir.program import Section, draws_numbers
from autopar.runtime.comm.groups import MeshGroups

# Two streams of a seed (autopar/ops/random.py). Checkpoints depend on these numbers, so they never change.
TRAINING, EVALUATION = 0, 1


def signed_seed(seed: int) -> int:
    """``seed`` as a signed 64-bit integer, which a tensor can store. The seed of a process that was not seeded is an
    unsigned one; as in torch, the same bits are the same seed."""
    bits = seed & 0xFFFF_FFFF_FFFF_FFFF
    return bits - 2**64 if bits >= 2**63 else bits


@dataclass
class RandomState:
    """The state that the random numbers of a model's next call are a function of. ``steps`` counts the calls that
    train, ``evaluations`` all others, which draw from a separate sequence and so do not affect training."""

    seed: int
    steps: int = 0
    evaluations: int = 0

    def __post_init__(self) -> None:
        self.seed = signed_seed(self.seed)

    def advance(self, trains: bool) -> torch.Tensor:
        """Counts the call. Returns its state in the form of :mod:`autopar.ops.random`, for the first microbatch."""
        count = self.steps if trains else self.evaluations
        if trains:
            self.steps += 1
        else:
            self.evaluations += 1
        return torch.tensor([self.seed, TRAINING if trains else EVALUATION, count, 0], device="cpu")


def draws(section: Section) -> bool:
    """Whether any instruction of ``section`` draws from the generator."""
    return any(map(draws_numbers, section.instructions))


@contextmanager
def shared_random(groups: MeshGroups) -> Iterator[None]:
    """Sets every rank's generator to the state of rank 0's while the context is open. Collective."""
    everyone = groups.over(groups.axes)
    own = state_of_generator(groups.device)
    if everyone.group is not None:
        # Between CPUs, where the state of a GPU's generator is too: nothing waits for the GPU.
        shared = own.clone()
        dist.broadcast(shared, group=groups.through_cpus(), group_src=0)
        set_state_of_generator(shared, groups.device)
    try:
        yield
    finally:
        if everyone.index != 0:
            set_state_of_generator(own, groups.device)


def state_of_generator(device: torch.device) -> torch.Tensor:
    """The state of the default generator of ``device``, on the processor."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_state_of_generator(state: torch.Tensor, device: torch.device) -> None:
    """The inverse of :func:`state_of_generator`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
