"""How far rounding alone moves gradients and buffers under a plan: it runs on values that differ by a unit of rounding.

A gradient that is zero in exact arithmetic is nothing but the rounding errors of what cancels in it, on one process and
under a plan, and the two may be of very different sizes: a kernel that sums in float64, or in a lucky order, leaves a
millionth of what another leaves. One of them says little about the other, so the plan's is measured. When parameters
and inputs change by a unit of rounding, a gradient changes by that part of itself, unless it is rounding: then it
becomes another sample of it, as far from the first as the first is from zero. Errors of a plan are results of the same
operations, and stay. Those that come and go, as in a race between streams, do not: they widen what is measured. No
difference is excused so that exceeds the tolerance of the largest gradient (:mod:`.gradients`).

The same tells how much of a gradient is rounding whose terms cancel far, but not to zero, and of a buffer, such as the
mean of what a norm before it has centred. What moves a value so is its condition: an error of a plan far above its
rounding moves it no more than the right value. Of a value that is more than rounding, no more than three tenths are
excused (:mod:`.tolerance`). (Stochastic arithmetic: Parker, Monte Carlo arithmetic, 1997;
Vignes, CADNA, 1993.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from autopar.torch_internals.state_versions import with_versions
from autopar.torch_internals.trees import tree_map

from .steps import Task, parallelized, step_from, whole_buffers, whole_gradients
from .tolerance import largest

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


def moved_by_rounding(rank: int, world: int, task: Task, unit: float, names: Collection[str]) -> dict[str, float]:
    """How far the gradients and buffers ``names`` under ``task.plan`` are moved by ``unit`` of rounding in one step.
    Buffers that no state has, which a step finds as the one before left them, are left out. Collective: every rank is
    given the same names."""
    parallel, args, kwargs = parallelized(task)
    parallel.prepare(args, kwargs, "loss")
    draws, whole = parallel.random_state(), task.model.state_dict()
    kept = whole.keys() & names

    def values(state: Mapping[str, Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, torch.Tensor]:
        parallel.load_state_dict(with_versions(state, whole))
        parallel.set_random_state(draws)
        parallel.zero_grad()
        step_from(parallel, draws, rank, *inputs)
        return whole_gradients(parallel, world, names) | whole_buffers(parallel, world, kept)

    return ranges(values, whole, (args, kwargs), unit)


def ranges(
    values: Callable[[Any, Any], Mapping[str, torch.Tensor]], state: Any, inputs: Any, unit: float
) -> dict[str, float]:
    """The largest range of any element of each of the ``values``, a function of ``state`` and ``inputs``, over these
    and :data:`SAMPLES` times others that are perturbed by ``unit``. Two samples are held, the least and the most."""
    least = dict(values(state, inputs))
    most = dict(least)
    for number in range(1, SAMPLES + 1):
        sample = values(*tree_map(partial(_moved, unit=unit, number=number), (state, inputs)))
        for name in least.keys() & sample.keys():
            least[name] = torch.minimum(least[name], sample[name])
            most[name] = torch.maximum(most[name], sample[name])
        del sample
    return {name: largest(most[name] - least[name]) for name in least}


def _moved(leaf: Any, unit: float, number: int) -> Any:
    return perturbed(leaf, unit, number) if isinstance(leaf, torch.Tensor) else leaf
