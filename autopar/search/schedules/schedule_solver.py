"""Solves for a schedule of given chunks, which may be uneven, placed in any order, or leave little memory.

The named schedules that the chunks admit, and two greedy orders (:mod:`.list_scheduling`), are simulated. The best of
those that fit the memory is given to CP-SAT (:mod:`.schedule_cpsat`) as a hint. CP-SAT's order is taken if it is
quicker when simulated. All reported ``seconds`` come from the simulator (:mod:`autopar.cost.pipeline.simulate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn

from autopar.cost.pipeline.bounds import step_lower_bound
from autopar.cost.pipeline.prices import PipelinePrices
from autopar.cost.pipeline.simulate import simulate
from autopar.errors import InfeasibleError
from autopar.schedule.actions import Action, Edge
from autopar.schedule.dependencies import Wiring
from autopar.schedule.messages import Orders, complete
from autopar.schedule.named import SCHEDULES, make_schedule
from autopar.schedule.schedule import Schedule, held_chunks

from .list_scheduling import greedy_orders
from .schedule_cpsat import Limits, ScheduleProgram, whole_bytes
from .schedule_size import MOST_COMPUTATIONS, computations

# Rounding durations to ticks lowers the bound by about this share.
OPTIMAL = 0.002
# How often CP-SAT is run again with less memory. Chosen: its limits leave out waiting messages, which are small.
ROUNDS = 3


@dataclass(frozen=True)
class SolvedSchedule:
    """``schedule`` takes ``seconds`` by simulation; no schedule of these chunks takes less than ``bound``.

    ``schedule`` is called "solved", or by its name if no order better than a named one was found. ``status``:
    "optimal" if the bound is met up to the rounding of durations (:data:`OPTIMAL`); "feasible" if not; "too large" if
    the chunks have too many computations for the solver. ``named``: simulated seconds of the named schedules that the
    chunks admit and that fit the memory.
    """

    schedule: Schedule
    seconds: float
    bound: float
    status: Literal["optimal", "feasible", "too large"]
    named: tuple[tuple[str, float], ...]

    @property
    def gap(self) -> float:
        """How far ``bound`` is below ``seconds``, as a share of ``seconds``."""
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class _ScheduleTask:
    """A scheduling task: the chunks and their wiring, the number of microbatches, prices, and memory limits."""

    wiring: Wiring
    microbatches: int
    prices: PipelinePrices
    limits: Limits

    def overshoot(self, schedule: Schedule) -> tuple[float, ...]:
        """For each rank, the simulated bytes beyond its limit."""
        if self.limits is None:
            return (0.0,) * schedule.stages
        peaks = simulate(schedule, self.prices).peak_bytes
        return tuple(max(0.0, peak - limit) for peak, limit in zip(peaks, self.limits, strict=True))

    def fits(self, schedule: Schedule) -> bool:
        return not any(self.overshoot(schedule))

    def seconds(self, schedule: Schedule) -> float:
        return simulate(schedule, self.prices).seconds

    def rank(self, schedule: Schedule) -> float:
        """The key by which schedules are compared. A named schedule wins over one whose seconds differ only by
        rounding."""
        return self.seconds(schedule) * (1.0 if schedule.name in SCHEDULES else 1.0 + 1e-9)

    def finished(self, orders: Orders) -> Schedule:
        """The quickest schedule with these orders of computations. Adjacent halves of a backward are joined where that
        delays no other rank, because an executor then has less to do."""
        everywhere = frozenset(range(len(self.wiring.placement)))
        quiet = frozenset(c for c in everywhere if not self.wiring.gradients_to[c])
        schedules = (
            complete("solved", _joined(orders, chunks), self.wiring.placement, self.wiring.edges, None, self.duration)
            for chunks in (everywhere, quiet, frozenset[int]())
        )
        return min(schedules, key=self.seconds)

    def duration(self, action: Action) -> float:
        return self.prices.duration(action)


def solve_schedule(
    prices: PipelinePrices,
    placement: tuple[int, ...],
    microbatches: int,
    edges: tuple[Edge, ...],
    memory_limits: Limits = None,
    time_limit: float = 5.0,
    seed: int = 0,
) -> SolvedSchedule:
    """The quickest schedule found for these chunks. Simulated, it is never slower than a named one that fits.

    ``placement``: chunk to pipeline rank. ``memory_limits``: bytes per rank, as the simulator counts them.
    ``time_limit`` counts CP-SAT's deterministic time, about seconds on one core, so that the same request has the
    same solution. Raises :class:`InfeasibleError` if nothing was found that fits the memory, :class:`ScheduleError` if
    prices and chunks do not fit each other.
    """
    prices.check(len(placement))
    task = _ScheduleTask(Wiring(placement, edges), microbatches, prices, memory_limits)
    named = tuple(s for s in named_schedules(placement, edges, microbatches, prices) if task.fits(s))
    candidates = [
        *named,
        *filter(task.fits, map(task.finished, greedy_orders(task.wiring, microbatches, prices, task.limits))),
    ]
    # If ranks share processors, no schedule is quicker than if each rank always had its processors to itself.
    bound = step_lower_bound(prices, placement, edges, microbatches) / prices.quickest
    best = min(candidates, key=task.rank, default=None)
    large = computations(placement, microbatches) > MOST_COMPUTATIONS
    meets_bound = best is not None and task.seconds(best) <= bound / (1 - OPTIMAL)
    if not meets_bound and not large:
        best, proven = _solved(task, best, bound, time_limit, seed)
        bound = max(bound, proven)
    if best is None:
        _refuse(task)
    seconds = task.seconds(best)
    status: Literal["optimal", "feasible", "too large"] = "too large" if large else "feasible"
    if seconds <= bound / (1 - OPTIMAL):
        status = "optimal"
    return SolvedSchedule(best, seconds, min(bound, seconds), status, tuple((s.name, task.seconds(s)) for s in named))


def named_schedules(
    placement: tuple[int, ...], edges: tuple[Edge, ...], microbatches: int, prices: PipelinePrices
) -> Iterator[Schedule]:
    """Every named schedule whose chunks are placed as ``placement`` says."""
    stages = max(placement) + 1
    chunks, rest = divmod(len(placement), stages)
    for name, named in SCHEDULES.items():
        allowed = not rest and named.least <= chunks and (named.most is None or chunks <= named.most)
        if allowed and named.placement(stages, chunks) == placement:
            yield make_schedule(name, stages, microbatches, chunks, edges, prices.duration)


def _solved(
    task: _ScheduleTask, best: Schedule | None, bound: float, time_limit: float, seed: int
) -> tuple[Schedule | None, float]:
    """CP-SAT's schedule if it is quicker than ``best``, and the lower bound that it proves, in seconds. CP-SAT does not
    count the bytes of waiting messages. If they do not fit, it is run again with limits lowered by the excess."""
    limits, proven = task.limits, -math.inf
    bound *= task.prices.quickest
    for _ in range(ROUNDS):
        program = ScheduleProgram(task.wiring, task.microbatches, task.prices, limits, bound)
        if best is not None:
            program.hint(best)
        orders, seconds = program.solve(time_limit, seed, OPTIMAL)
        if limits is task.limits:
            proven = seconds / task.prices.quickest
        if orders is None:
            break
        schedule = task.finished(orders)
        over = task.overshoot(schedule)
        if not any(over):
            better = best is None or task.rank(schedule) < task.rank(best)
            return (schedule if better else best), proven
        limits = tuple(limit - excess for limit, excess in zip(limits or (), over, strict=True))
    return best, proven


def _joined(orders: Orders, chunks: frozenset[int]) -> Orders:
    """The orders in which, for ``chunks``, an input gradient and the weight gradient right after it are one
    backward."""
    return tuple(tuple(_join(listed, chunks)) for listed in orders)


def _join(listed: tuple[Action, ...], chunks: frozenset[int]) -> Iterator[Action]:
    before: Action | None = None
    for action in listed:
        chunk, microbatch = action.chunk, action.microbatch
        halves = before == Action("input_gradient", chunk, microbatch) and action.kind == "weight_gradient"
        if halves and chunk in chunks:
            before = Action("backward", chunk, microbatch)
            continue
        if before is not None:
            yield before
        before = action
    if before is not None:
        yield before


def _refuse(task: _ScheduleTask) -> NoReturn:
    """Raises an error that names the bytes needed for one microbatch at a time, the least that any schedule holds."""
    prices, placement = task.prices, task.wiring.placement
    held = [
        sum(prices.chunks[c].static for c in chunks) + max((whole_bytes(prices, c) for c in chunks), default=0.0)
        for chunks in held_chunks(placement, max(placement) + 1)
    ]
    needs = ", ".join(f"rank {rank} at least {math.ceil(n)}" for rank, n in enumerate(held))
    limits = ", ".join(f"{limit:.0f}" for limit in task.limits or ())
    raise InfeasibleError(f"no schedule was found within {limits} bytes per rank; needed: {needs} bytes")
