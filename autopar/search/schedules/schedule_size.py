"""How large the program of a schedule is. Apart from the program, which loads CP-SAT."""

from __future__ import annotations

from autopar.schedule.actions import Kind

SPLIT: tuple[Kind, ...] = ("forward", "input_gradient", "weight_gradient")
# Chosen: the largest that benchmarks/results/schedules.json has solved has 768.
MOST_COMPUTATIONS = 800


def computations(placement: tuple[int, ...], microbatches: int) -> int:
    """How many computations a step has if backward is split."""
    return len(placement) * microbatches * len(SPLIT)
