"""The outer search: stages, microbatches, cuts and schedule, around the placement program.

For each way to divide the devices into stages and the batch into microbatches, the placement program is solved once,
for the graph of one microbatch on the mesh inside a stage. Its answer prices every node; from these prices come the
cuts (:mod:`.stage_cuts`) and, for each schedule, the simulated step (:mod:`.stage_prices`). The quickest step wins.

The memory of the uncut graph stands for all stages together; a stage that turns out too full asks for a solution with
less memory, a few times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from autopar.passes.cut_candidates import CutCandidate, cut_candidates
from autopar.passes.microbatch import Microbatched, microbatch
from autopar.passes.rest import InsertRests
from autopar.passes.stages import cut

from .account import Account
from .assignment import Assignment
from .errors import InfeasibleError, OptionsError
from .graph import Graph
from .instance import Instance
from .planned_pipeline import PlannedPipeline
from .prices import Prices
from .problem import Solution
from .repeats import Repeats
from .schedule import Edge as Link
from .schedule import Schedule
from .schedules import SCHEDULES, make_schedule
from .stage_chunks import place_chunks
from .stage_cuts import best_cuts
from .stage_meshes import Layout
from .stage_prices import StageBill, bill_stages, most_in_flight, wire_prices
from .stage_segments import pinned_ranks, price_segments, segment_of_nodes
from .stages import Staged

SOLVED = "solved"
ROUNDS = 3
MOST_CHUNKS = 4


@dataclass(frozen=True)
class Joint:
    """The answer of the placement program for the uncut graph of one microbatch."""

    instance: Instance
    solution: Solution
    assignment: Assignment
    account: Account

    @property
    def prices(self) -> Prices:
        return self.instance.prices


@dataclass(frozen=True)
class StagedAnswer:
    """A cut, placed and scheduled graph; ``whole`` is the answer it was cut from."""

    layout: Layout
    whole: Joint
    bill: StageBill
    pipeline: PlannedPipeline

    @property
    def seconds(self) -> float:
        return self.bill.seconds


@dataclass(frozen=True)
class Ask:
    """What is searched: the concrete step ``graph`` (no rests) at the whole batch, how to divide it, and what is
    fixed. ``solve`` solves the placement program of a graph with rests within so many bytes."""

    graph: Graph
    layout: Layout
    microbatches: int
    schedule: str | None
    pins: dict[str, str]
    memory_limit: float
    optimizer: str
    solve: Callable[[Graph, Repeats, float], Joint]


def search(ask: Ask) -> StagedAnswer:
    """The quickest pipeline for one layout and number of microbatches.

    Raises:
        InfeasibleError: no stage division fits into memory.
        OptionsError: the batch does not divide, the model has too few places to cut, or a pin cannot be met.
    """
    pieces = microbatch(ask.graph, ask.microbatches)
    candidates = cut_candidates(pieces.graph) if ask.layout.stages > 1 else ()
    where = segment_of_nodes(pieces.graph, candidates)
    limit, worst = ask.memory_limit * ask.layout.stages, math.inf
    for _ in range(ROUNDS):
        whole = ask.solve(InsertRests()(pieces.graph), _repeats(ask), limit)
        found = list(_scheduled(ask, pieces, candidates, where, whole))
        fitting = [answer for answer in found if max(answer.bill.peaks) <= ask.memory_limit]
        if fitting:
            return min(fitting, key=lambda answer: answer.seconds)
        worst = min([worst, *(float(max(answer.bill.peaks)) for answer in found)])
        limit *= 0.95 * min(1.0, ask.memory_limit / worst) if math.isfinite(worst) else 0.8
    raise _too_full(ask, worst)


def _repeats(ask: Ask) -> Repeats:
    """On average over stages, half as many microbatches are in flight as there are stages."""
    return Repeats(ask.microbatches, min(ask.microbatches, math.ceil((ask.layout.stages + 1) / 2)), accumulates=True)


def _too_full(ask: Ask, worst: float) -> InfeasibleError:
    least = f"; the fullest stage of the best cut needs {worst:.0f}" if math.isfinite(worst) else ""
    return InfeasibleError(
        f"{ask.layout.stages} stages on meshes {ask.layout.mesh} with {ask.microbatches} microbatches do not fit into "
        f"{ask.memory_limit:.0f} bytes per device{least}. More stages or microbatches hold less each"
    )


def schedule_choices(stages: int, asked: str | None) -> Iterator[tuple[str, int]]:
    """Names of schedules with the chunks per stage to try them with. One made to measure starts from the cut of the
    best of them. Raises :class:`OptionsError` for a name that is none."""
    asked = None if asked == SOLVED else asked
    if asked is not None and asked not in SCHEDULES:
        known = ", ".join((*SCHEDULES, SOLVED))
        raise OptionsError(f"schedule={asked!r} is not known; one of {known}, or None to search")
    if stages == 1 and asked is None:
        yield "1f1b", 1
        return
    for name, named in SCHEDULES.items():
        if asked in (None, name):
            most = min(named.most or MOST_CHUNKS, MOST_CHUNKS)
            yield from ((name, chunks) for chunks in range(named.least, most + 1) if chunks == 1 or name != "gpipe")


def _scheduled(
    ask: Ask, pieces: Microbatched, candidates: tuple[CutCandidate, ...], where: dict[str, int], whole: Joint
) -> Iterator[StagedAnswer]:
    """An answer for each schedule that the graph has enough cuts for."""
    stages, enough = ask.layout.stages, False
    pinned = pinned_ranks(pieces.graph, where, len(candidates) + 1, ask.pins, stages)
    for name, chunks in schedule_choices(stages, ask.schedule):
        if stages * chunks > len(candidates) + 1:
            continue
        enough = True
        made = _cut_for(ask, pieces, candidates, where, whole, (name, chunks), pinned)
        if made is not None:
            yield made
    if not enough:
        raise OptionsError(
            f"stages={stages}: the model has {len(candidates) + 1} regions between places where it can be cut; that "
            f"many stages at most (chunks of interleaved schedules counted)"
        )


def _cut_for(
    ask: Ask,
    pieces: Microbatched,
    candidates: tuple[CutCandidate, ...],
    where: dict[str, int],
    whole: Joint,
    kind: tuple[str, int],
    pinned: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> StagedAnswer | None:
    (name, chunks), stages = kind, ask.layout.stages
    schedule = make_schedule(name, stages, ask.microbatches, chunks)
    devices = math.prod(ask.layout.mesh)
    links = wire_prices(whole.prices.cluster, tuple(range(stages)), devices, _ring(stages))
    slowest = min(links.values(), key=lambda link: link.bandwidth)
    segments = price_segments(pieces.graph, candidates, where, whole.instance, whole.assignment, whole.account, slowest)
    # The chunks of a rank share its memory: each may take its part of it.
    limit = ask.memory_limit / chunks
    cuts = best_cuts(segments, most_in_flight(schedule), limit, np.array(schedule.placement), pinned)
    if cuts is None:
        return None
    return cut_answer(ask.layout, pieces, cuts, (name, chunks), whole, ask.optimizer)


def _ring(stages: int) -> tuple[tuple[int, int], ...]:
    return tuple((s, (s + 1) % stages) for s in range(stages))


def cut_answer(
    layout: Layout, pieces: Microbatched, cuts: tuple[str, ...], kind: tuple[str, int], whole: Joint, optimizer: str
) -> StagedAnswer:
    """The graph cut at ``cuts`` under the schedule ``kind`` (name, chunks per stage): placed and priced."""
    staged = cut(pieces, cuts)
    schedule = scheduled(kind, layout.stages, pieces.count, staged)
    pairs = tuple((edge.source, edge.target) for edge in staged.edges)
    links = wire_prices(whole.prices.cluster, schedule.placement, math.prod(layout.mesh), pairs)
    chunks, wires = place_chunks(staged, whole.assignment, whole.prices, links)
    bill = bill_stages(chunks, wires, schedule, whole.prices, links, optimizer)
    return StagedAnswer(layout, whole, bill, PlannedPipeline(cuts, schedule, wires))


def scheduled(kind: tuple[str, int], stages: int, microbatches: int, staged: Staged) -> Schedule:
    """The named schedule over the links of a cut graph; a link has a gradient to bring back if backward values travel
    there."""
    back = {(edge.target, edge.source) for edge in staged.edges if edge.phase == "backward"}
    forward = {(edge.source, edge.target) for edge in staged.edges if edge.phase == "forward"}
    links = tuple(Link(low, high, (low, high) in back) for low, high in sorted(forward | back))
    return make_schedule(kind[0], stages, microbatches, kind[1], links)
