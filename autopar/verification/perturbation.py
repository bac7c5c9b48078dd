"""How far rounding alone moves the gradients under a plan: by running it on values that differ by a unit of rounding.

A gradient that is zero in exact arithmetic is nothing but the rounding errors of what cancels in it, on one process and
under a plan, and the two may be of very different sizes: a kernel that sums in float64, or in a lucky order, leaves a
millionth of what another leaves. One of them says little about the other, so the plan's is measured. When parameters
and inputs change by a unit of rounding, a gradient changes by that part of itself, unless it is rounding: then it
becomes another sample of it, as far from the first as the first is from zero. Errors of a plan are results of the same
operations, and stay. (Stochastic arithmetic: Parker, Monte Carlo arithmetic, 1997; Vignes, CADNA, 1993.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from autopar.torch_internals.trees import tree_map

from .steps import Task, parallelized, step_from, whole_gradients

# Steps on perturbed values. Chosen: with the plan's own, six samples of a normal distribution span 2.5 of its standard
# deviations, and less than a quarter of one only once in some thousand times.
SAMPLES = 5
# Of Fibonacci hashing: 2^64 over the golden ratio, as a signed number.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def perturbed(tensor: torch.Tensor, unit: float, number: int) -> torch.Tensor:
    """``tensor`` with about half of its elements farther from zero by ``unit``, relative: the same for equal values, so
    that copies stay alike; others for every ``number``. Whole numbers stay, which are often masks, indices or labels.
    Shape and dtype are those of ``tensor``."""
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.detach().double()
    hashed = ((wide.contiguous().view(torch.int64) >> 16) * _GOLDEN + number * 0x632BE5AB) * _GOLDEN
    chosen = ((hashed >> 62) & 1).bool() & (wide != wide.trunc())
    return torch.where(chosen, wide * (1 + unit), wide).to(tensor.dtype)


def moved_by_rounding(rank: int, world: int, task: Task, unit: float) -> dict[str, float]:
    """How far every gradient under ``task.plan`` is moved by ``unit`` of rounding. Collective."""
    parallel, args, kwargs = parallelized(task)
    parallel.prepare(args, kwargs, "loss")
    draws = parallel.random_state()

    def gradients(state: dict[str, Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, torch.Tensor]:
        parallel.load_state_dict(state)
        parallel.set_random_state(draws)
        parallel.zero_grad()
        step_from(parallel, draws, rank, *inputs)
        return whole_gradients(parallel, world)

    return ranges(gradients, dict(task.model.state_dict()), (args, kwargs), unit)


def ranges(
    gradients: Callable[[Any, Any], Mapping[str, torch.Tensor]], state: Any, inputs: Any, unit: float
) -> dict[str, float]:
    """The largest range of any element of each of the ``gradients``, a function of ``state`` and ``inputs``, over these
    and :data:`SAMPLES` times others that are perturbed by ``unit``."""
    samples = [gradients(state, inputs)]
    for number in range(1, SAMPLES + 1):
        samples.append(gradients(*tree_map(partial(_moved, unit=unit, number=number), (state, inputs))))
    return {name: _range([sample[name] for sample in samples if name in sample]) for name in samples[0]}


def _moved(leaf: Any, unit: float, number: int) -> Any:
    return perturbed(leaf, unit, number) if isinstance(leaf, torch.Tensor) else leaf


def _range(samples: list[torch.Tensor]) -> float:
    """The largest difference between values of one element."""
    stacked = torch.stack(samples)
    return float((stacked.amax(0) - stacked.amin(0)).max()) if stacked.numel() else 0.0
