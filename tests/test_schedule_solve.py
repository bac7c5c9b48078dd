"""Solver-made schedules: right by the checker, never slower than the named ones, quicker for uneven stages."""

from __future__ import annotations

import pytest

from autopar.cost import ChunkPrice, EdgePrice, PipelinePrices, simulate
from autopar.errors import InfeasibleError
from autopar.schedule import chain, loop_placement
from autopar.schedule_check import check
from autopar.schedule_solve import solve_schedule

UNEVEN = tuple(
    ChunkPrice(f, f, w, until_weight_gradient=1.0) for f, w in ((3.0, 1.0), (1.0, 1.0), (1.0, 1.0), (2.0, 4.0))
)
PLACEMENT = loop_placement(4, 1)


def test_uneven_stages_gain_from_a_schedule_of_their_own() -> None:
    prices = PipelinePrices(UNEVEN)
    limits = (3.0,) * 4
    solved = solve_schedule(PLACEMENT, chain(4), 6, prices, limits, time_limit=3)
    check(solved.schedule, "blocking")
    simulation = simulate(solved.schedule, prices)
    assert simulation.seconds == solved.seconds
    assert max(simulation.peak_bytes) <= 3
    assert solved.bound <= solved.seconds
    assert solved.seconds <= min((seconds for _, seconds in solved.named), default=float("inf"))
    freely = solve_schedule(PLACEMENT, chain(4), 6, prices, time_limit=3)
    assert freely.seconds < min(seconds for name, seconds in freely.named if name in ("gpipe", "1f1b"))
    assert freely.seconds <= min(seconds for _, seconds in freely.named)
    assert freely == solve_schedule(PLACEMENT, chain(4), 6, prices, time_limit=3)


def test_transfers_and_chunks_that_lie_anyhow() -> None:
    """No named schedule has this placement; edges cross ranks and stay."""
    prices = PipelinePrices(UNEVEN, {edge[:2]: EdgePrice(latency=0.5) for edge in chain(4)})
    solved = solve_schedule((0, 0, 1, 0), chain(4), 3, prices, time_limit=2)
    check(solved.schedule, "blocking")
    assert solved.named == ()
    assert solved.status in ("optimal", "feasible")


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(InfeasibleError, match="rank 3 at least 1 bytes"):
        solve_schedule(PLACEMENT, chain(4), 2, PipelinePrices(UNEVEN), (0.5,) * 4, time_limit=1)
