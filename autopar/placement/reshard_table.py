"""The cheapest paths between the placements of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanMismatchError
from autopar.ir.placements import Placements, short
from autopar.ir.reshard import Hop


@dataclass(frozen=True, eq=False)
class ReshardTable:
    """The cheapest paths between placements of one tensor: ``seconds[i, j]`` from ``states[i]`` to ``states[j]``,
    infinite if there is none, and the hops (:class:`autopar.ir.reshard.Hop`) of the paths."""

    states: tuple[Placements, ...]
    seconds: NDArray[np.float64]
    hops: Mapping[tuple[int, int], Hop]
    next_state: NDArray[np.int64]

    @cached_property
    def index(self) -> dict[Placements, int]:
        return {state: i for i, state in enumerate(self.states)}

    def cost(self, source: Placements, target: Placements) -> float:
        return float(self.seconds[self.index[source], self.index[target]])

    def path(self, source: Placements, target: Placements) -> tuple[Hop, ...]:
        """The hops from ``source`` to ``target``; none if they are equal. Raises :class:`PlanMismatchError` if there is
        no path."""
        if not {source, target} <= self.index.keys() or not np.isfinite(self.cost(source, target)):
            raise PlanMismatchError(
                f"no reshard leads from {short(source)} to {short(target)}; the plan is for other shapes"
            )
        state, end, hops = self.index[source], self.index[target], []
        while state != end:
            following = int(self.next_state[state, end])
            hops.append(self.hops[state, following])
            state = following
        return tuple(hops)


def shortest_paths(seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Floyd-Warshall: the least cost between all pairs, and the first step of each path."""
    best = seconds.copy()
    count = len(best)
    next_state = np.tile(np.arange(count), (count, 1))
    for middle in range(count):
        through = best[:, middle, None] + best[None, middle, :]
        better = through < best - 1e-18
        best = np.where(better, through, best)
        next_state = np.where(better, next_state[:, middle, None], next_state)
    return best, next_state
