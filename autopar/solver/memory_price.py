"""What a byte of the device's memory is worth, by assignments that are known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .problem import Ints, Problem, evaluate, memory_of


def price_between(problem: Problem, known: Iterable[Ints]) -> float:
    """Seconds per byte at the limit of memory: of the lines from an assignment that fits to a cheaper one that does
    not, the slope of the one that is lowest there. 0 if there is no such line."""
    points = [(memory_of(problem, choices), evaluate(problem, choices)) for choices in known]
    limit, least, price = problem.memory_limit, np.inf, 0.0
    if not np.isfinite(limit):
        return price
    for own, cost in points:
        for other, cheaper in points:
            if own <= limit < other and cheaper < cost < np.inf:
                slope = (cost - cheaper) / (other - own)
                if cost - slope * (limit - own) < least:
                    least, price = cost - slope * (limit - own), slope
    return price
