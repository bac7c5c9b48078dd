"""Problems that differ in the limit of the device's memory alone are reduced together, as far as no limit matters.

Of programs of transformers that takes nine tenths of their reductions, and these a quarter of a solve.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from .budget import reduced_seconds
from .cost_digest import digest_without_limit
from .problem import Problem
from .reduce import Chain, ReducedForAnyLimit, size_of

# Pairs of rows and columns of the problems that are kept, those used last, besides the last one.
# Chosen: 32 MiB of float64.
KEPT_PAIRS = 1 << 22


class SharedReductions:
    """The reduced problems of several solves, told apart by what is in them."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, ReducedForAnyLimit] = OrderedDict()

    def reduce(self, problem: Problem) -> tuple[Problem, Chain, float]:
        """:func:`.reduce.reduce` of a problem with a limit of the device's memory, and the counted seconds that it
        takes: as many if it is known, so that no solution depends on those before it."""
        known = self._of(problem)
        reduced, further = known.within(problem.memory_limit)
        seconds = reduced_seconds(problem, len(known.chain.links)) + reduced_seconds(known.problem, len(further.links))
        # The price of memory may be another.
        return replace(reduced, memory_price=problem.memory_price), Chain((known.chain, further)), seconds

    def _of(self, problem: Problem) -> ReducedForAnyLimit:
        digest = digest_without_limit(problem)
        if digest not in self._known:
            self._known[digest] = ReducedForAnyLimit.of(problem)
        self._known.move_to_end(digest)
        while len(self._known) > 1 and sum(size_of(each.problem)[2] for each in self._known.values()) > KEPT_PAIRS:
            self._known.popitem(last=False)
        return self._known[digest]
