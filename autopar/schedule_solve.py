"""A schedule made to measure: the order of computations that CP-SAT finds best for uneven chunks.

Let x be a computation of a chunk c and a microbatch b: forward (F), input gradient (I), weight gradient (W). Minimise
the makespan T over integer starts s(x), with d(x) the duration in ticks and t(c, e) the ticks of a message:

    s(F_eb) >= s(F_cb) + d(F_c) + t(c, e)             for every edge c -> e         (values)
    s(I_cb) >= s(I_eb) + d(I_e) + t(e, c)             for every edge with gradient   (gradients)
    s(I_cb) >= s(F_cb) + d(F_c),  s(W_cb) >= s(I_cb) + d(I_c)                        (halves)
    x, y of one rank do not overlap                                                  (no-overlap)
    what a rank holds never exceeds its memory limit                                 (cumulative)
    s(x_c,b+1) >= s(x_cb) + d(x_c)                   microbatches are alike         (symmetry)
    T >= s(x) + d(x)

What is held is as in :class:`~autopar.cost.pipeline_prices.ChunkPrice`: one amount from F to the end of I, one from F
to the end of W, one from I to the end of W. Durations are rounded to ticks, so bound and makespan of the solver are in
ticks; what counts, and is reported, is the simulated time of the finished lists. The best named schedule that fits
is the hint, and is returned if the solver finds nothing that simulates quicker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from ortools.sat.python import cp_model

from autopar.cost.pipeline import simulate
from autopar.cost.pipeline_bounds import step_lower_bound
from autopar.cost.pipeline_prices import ChunkPrice, EdgePrice, PipelinePrices

from .errors import InfeasibleError
from .schedule import Edge, Instruction, Kind, Message, Schedule, held_chunks
from .schedule_messages import Orders, complete
from .schedule_wiring import Wiring, prerequisites, producers
from .schedules import SCHEDULES, make_schedule

_SPLIT: tuple[Kind, ...] = ("forward", "input_gradient", "weight_gradient")
_TICKS = 200


@dataclass(frozen=True)
class SolvedSchedule:
    """``schedule`` with its simulated ``seconds``. No schedule of these chunks beats ``bound`` seconds. ``named``: the
    simulated seconds of the named schedules that the same chunks admit and that fit the memory (the best of them was
    the hint). ``status`` says whether the order is proven best in ticks, or the named schedule was kept."""

    schedule: Schedule
    seconds: float
    bound: float
    status: Literal["optimal", "feasible", "named"]
    named: tuple[tuple[str, float], ...]

    @property
    def gap(self) -> float:
        """How far ``bound`` lies below ``seconds``, as a share of ``seconds``."""
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0


def fits(schedule: Schedule, prices: PipelinePrices, limits: tuple[float, ...] | None) -> bool:
    """Whether the simulated peak of every rank is within its limit."""
    peaks = simulate(schedule, prices).peak_bytes if limits else ()
    return all(peak <= limit for peak, limit in zip(peaks, limits or (), strict=True))


def named_schedules(
    placement: tuple[int, ...], edges: tuple[Edge, ...], microbatches: int, prices: PipelinePrices
) -> tuple[Schedule, ...]:
    """Every named schedule whose chunks lie as ``placement`` says."""
    stages = max(placement) + 1
    chunks, rest = divmod(len(placement), stages)
    found = []
    for name, named in SCHEDULES.items():
        allowed = not rest and named.least <= chunks and (named.most is None or chunks <= named.most)
        if allowed and named.placement(stages, chunks) == placement:
            found.append(make_schedule(name, stages, microbatches, chunks, edges, prices.duration))
    return tuple(found)


def solve_schedule(
    placement: tuple[int, ...],
    edges: tuple[Edge, ...],
    microbatches: int,
    prices: PipelinePrices,
    memory_limits: tuple[float, ...] | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
) -> SolvedSchedule:
    """The quickest schedule found for these chunks: never slower, simulated, than a named one that fits.

    ``memory_limits``: bytes per rank. ``time_limit`` counts CP-SAT's deterministic time, about seconds on one core, so
    that the same question has the same answer. Raises :class:`InfeasibleError` if no schedule fits the memory.
    """
    fitting = [s for s in named_schedules(placement, edges, microbatches, prices) if fits(s, prices, memory_limits)]
    named = [(s, simulate(s, prices).seconds) for s in fitting]
    hint = min(named, key=lambda pair: pair[1])[0] if named else None
    times = tuple((s.name, seconds) for s, seconds in named)
    bound = step_lower_bound(prices, placement, edges, microbatches)
    longest = max(max(c.forward, c.input_gradient, c.weight_gradient) for c in prices.chunks) or 1.0
    model = _Model(Wiring(placement, edges), microbatches, prices, memory_limits, longest)
    if hint is not None:
        model.hint(hint)
    status, orders = model.solve(time_limit, seed)
    candidates = [(s, seconds, "named") for s, seconds in named]
    if orders is not None:
        made = complete("solved", orders, placement, edges, duration=prices.duration)
        if fits(made, prices, memory_limits):
            candidates.append((made, simulate(made, prices).seconds, status))
    if not candidates:
        _refuse(placement, prices, memory_limits, status)
    best = min(candidates, key=lambda found: found[1])
    return SolvedSchedule(best[0], best[1], bound, best[2], times)  # type: ignore[arg-type]


def _refuse(
    placement: tuple[int, ...], prices: PipelinePrices, limits: tuple[float, ...] | None, status: str
) -> NoReturn:
    """Says what one microbatch at a time would need, the least that any schedule holds."""
    held = [
        sum(prices.chunks[c].static for c in chunks) + max((_whole(prices, c) for c in chunks), default=0.0)
        for chunks in held_chunks(placement, max(placement) + 1)
    ]
    needs = ", ".join(f"rank {rank} at least {math.ceil(n)}" for rank, n in enumerate(held))
    given = ", ".join(f"{limit:.0f}" for limit in limits or ())
    raise InfeasibleError(f"no schedule was found ({status}) within {given} bytes per rank; needed: {needs} bytes")


def _whole(prices: PipelinePrices, chunk: int) -> float:
    price = prices.chunks[chunk]
    return price.until_input_gradient + price.until_weight_gradient + price.between_gradients


def _in_ticks(prices: PipelinePrices, edges: tuple[Edge, ...], tick: float) -> PipelinePrices:
    """The same pipeline with whole ticks, halves of backward only, and messages that only take time."""

    def ticks(seconds: float) -> int:
        return round(seconds / tick)

    chunks = tuple(
        ChunkPrice(ticks(c.forward), ticks(c.input_gradient), ticks(c.weight_gradient)) for c in prices.chunks
    )
    moved = {}
    for edge in edges:
        price = prices.edges.get(edge[:2])
        if price is not None:
            slower = max(price.bytes_of("forward"), price.bytes_of("backward"))
            moved[edge[:2]] = EdgePrice(latency=ticks(price.latency + slower / price.bandwidth))
    return PipelinePrices(chunks, moved, buffered=True)


class _Model:
    """The program stated above."""

    def __init__(
        self,
        wiring: Wiring,
        microbatches: int,
        prices: PipelinePrices,
        limits: tuple[float, ...] | None,
        longest: float,
    ) -> None:
        self.wiring, self.prices, self.limits, self.microbatches = wiring, prices, limits, microbatches
        self.ticks = _in_ticks(prices, wiring.edges, longest / _TICKS)
        self.chunks = range(len(wiring.placement))
        self.model = cp_model.CpModel()
        work = sum(c.forward + c.whole_backward for c in self.ticks.chunks) * microbatches
        travel = sum(2 * edge.latency for edge in self.ticks.edges.values()) * microbatches
        self.horizon = int(work + travel) + 1
        self.start = {i: self.model.new_int_var(0, self.horizon, str(i)) for i in self.computations()}
        self.makespan = self.model.new_int_var(0, self.horizon, "makespan")
        self.order()
        self.exclude()
        if limits:
            self.hold(limits)
        self.model.minimize(self.makespan)

    def computations(self) -> Iterator[Instruction]:
        for chunk in self.chunks:
            for microbatch in range(self.microbatches):
                yield from (Instruction(kind, chunk, microbatch) for kind in _SPLIT)

    def end(self, instruction: Instruction) -> Any:
        return self.start[instruction] + int(self.ticks.duration(instruction))

    def order(self) -> None:
        """(values), (gradients), (halves), (symmetry), and the makespan."""
        for instruction, start in self.start.items():
            self.model.add(self.makespan >= self.end(instruction))
            for before in prerequisites(instruction):
                self.model.add(start >= self.end(before))
            for message in self.wiring.arrivals(instruction):
                self.model.add(start >= self.end(producers(message)[0]) + self.travel(message))
            after = replace(instruction, microbatch=instruction.microbatch + 1)
            if after in self.start:
                self.model.add(self.start[after] >= self.end(instruction))

    def travel(self, message: Message) -> int:
        pair = (message.source, message.target) if message.source < message.target else message[2:0:-1]
        price = self.ticks.edges.get((pair[0], pair[1]))
        return int(price.latency) if price is not None and self.wiring.crosses(message) else 0

    def exclude(self) -> None:
        """(no-overlap)"""
        for held in held_chunks(self.wiring.placement, max(self.wiring.placement) + 1):
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(start, int(self.ticks.duration(i)), f"run {i}")
                for i, start in self.start.items()
                if i.chunk in held
            )

    def hold(self, limits: tuple[float, ...]) -> None:
        """(cumulative), in units that round needs up and limits down."""
        for rank, limit in enumerate(limits):
            held = [chunk for chunk in self.chunks if self.wiring.placement[chunk] == rank]
            unit = max(1.0, limit / 1e6)
            capacity = math.floor((limit - sum(self.prices.chunks[c].static for c in held)) / unit)
            if capacity < 0:
                self.model.add_bool_or([])
                continue
            spans, amounts = [], []
            for chunk in held:
                for nbytes, first, last in self.held(chunk):
                    amounts.append(math.ceil(nbytes / unit))
                    size = self.model.new_int_var(0, self.horizon, "")
                    spans.append(self.model.new_interval_var(self.start[first], size, self.end(last), ""))
            self.model.add_cumulative(spans, amounts, capacity)

    def held(self, chunk: int) -> Iterator[tuple[float, Instruction, Instruction]]:
        """(bytes, from the start of, to the end of) for every microbatch."""
        price = self.prices.chunks[chunk]
        for microbatch in range(self.microbatches):
            forward, first, second = (Instruction(kind, chunk, microbatch) for kind in _SPLIT)
            spans = ((price.until_input_gradient, forward, first), (price.until_weight_gradient, forward, second))
            for nbytes, begin, end in (*spans, (price.between_gradients, first, second)):
                if nbytes:
                    yield nbytes, begin, end

    def hint(self, schedule: Schedule) -> None:
        """The starts of ``schedule``, replayed in ticks; a whole backward is its two halves."""
        for ran in simulate(schedule, self.ticks).record.ran:
            instruction, start = ran.instruction, int(ran.start)
            if instruction.kind == "backward":
                first, second = (replace(instruction, kind=kind) for kind in _SPLIT[1:])
                self.model.add_hint(self.start[first], start)
                self.model.add_hint(self.start[second], start + int(self.ticks.duration(first)))
            elif instruction.computes:
                self.model.add_hint(self.start[instruction], start)

    def solve(self, time_limit: float, seed: int) -> tuple[str, Orders | None]:
        """CP-SAT's status, and the computations of each rank in the order of their starts."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = time_limit
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return solver.status_name(status).lower(), None
        # Of two that begin together the first takes no time: it keeps the order of forward and its halves.
        at = {
            i: (solver.value(start), self.ticks.duration(i) > 0, n) for n, (i, start) in enumerate(self.start.items())
        }
        orders = tuple(
            tuple(sorted((i for i in self.start if i.chunk in held), key=lambda i: at[i]))
            for held in held_chunks(self.wiring.placement, max(self.wiring.placement) + 1)
        )
        return solver.status_name(status).lower(), orders
