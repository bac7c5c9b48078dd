"""The fields of a pipeline's plan that differ from those of the uncut graph's plan."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autopar.cost import total_flops
from autopar.ir.microbatching import Repeats
from autopar.ir.placements import Strategy
from autopar.ir.plan_record import PlanLine, PlanNode, Predicted, ResidentTensor
from autopar.passes.pipeline.cut import sent_node
from autopar.placement.alternatives import holdings, plan_nodes
from autopar.placement.breakdown import CostLine
from autopar.placement.overlap_windows import REDUCTIONS
from autopar.placement.placed_step import PlacedStep
from autopar.placement.predicted import dtype_of
from autopar.placement.prices import Prices
from autopar.search.stage_prices.pipeline_breakdown import PipelineBreakdown, in_flight_at_peak
from autopar.search.stage_prices.shared_parameters import shared_parameters

from .pipeline_solution import PipelineSolution


def staged_predicted(solution: PipelineSolution) -> Predicted:
    """The figures of a pipeline. Compute and communication are those of the busiest rank. The bubble is the rest of the
    step, beyond the seconds for which that rank is busy. Processors of waiting ranks shorten these by
    ``freed_seconds``. Memory is that of the fullest rank's devices."""
    breakdown = solution.breakdown
    busiest = busiest_rank(breakdown)
    lines = rank_lines(breakdown, busiest)
    compute = sum(line.seconds for line in lines if line.kind in ("compute", "optimizer"))
    busy, freed = sum(line.seconds for line in lines), _freed_seconds(breakdown, busiest)
    seconds = max(breakdown.seconds, busy - freed)
    memories = [breakdown.breakdowns[c].memory for c in breakdown.schedule.held[breakdown.fullest]]
    graph = solution.uncut.instance.graph
    dtype = dtype_of(graph)
    possible = sum(own.devices * own.cluster.device.flops(dtype) for own in solution.prices) * seconds
    return Predicted(
        step_seconds=seconds,
        compute_seconds=compute,
        comm_seconds=busy - compute,
        # Sums in another order differ by their rounding, which is no bubble.
        bubble_seconds=0.0 if math.isclose(seconds, busy - freed, rel_tol=1e-12) else seconds - (busy - freed),
        peak_bytes=breakdown.peaks[breakdown.fullest],
        weight_bytes=sum(m.weights for m in memories),
        gradient_bytes=sum(m.gradients for m in memories),
        optimizer_bytes=sum(m.optimizer for m in memories),
        activation_bytes=sum(m.activations for m in memories),
        temporary_bytes=max(m.temporary for m in memories),
        input_bytes=sum(m.inputs for m in memories),
        host_bytes=sum(m.host for m in memories),
        nvme_bytes=sum(m.nvme for m in memories),
        mfu=float(total_flops(graph)) * breakdown.schedule.microbatches / possible if possible else 0.0,
        freed_seconds=freed,
    )


def _freed_seconds(breakdown: PipelineBreakdown, rank: int) -> float:
    """Seconds by which ``rank`` is quicker than priced because ranks that share its processors wait."""
    if breakdown.prices.shared is None:
        return 0.0
    freed = 0.0
    for span in breakdown.simulation.record.ran:
        if span.rank == rank and span.action.kind != "reduce":
            is_step = span.action.kind == "step"
            freed += (breakdown.prices.step if is_step else breakdown.prices.duration(span.action)) - (
                span.end - span.start
            )
    return max(0.0, freed)


def rank_lines(breakdown: PipelineBreakdown, rank: int) -> tuple[CostLine, ...]:
    """The cost lines of a pipeline rank's devices: the lines of its chunks, and a negative one for the simulated
    reductions that overlap computation."""
    own = [line for chunk in breakdown.schedule.held[rank] for line in breakdown.breakdowns[chunk].lines]
    hidden = _reduced_meanwhile(breakdown, rank)
    return (*own, *([CostLine("hidden", REDUCTIONS, "", "backward", -hidden)] if hidden > 0 else []))


def _reduced_meanwhile(breakdown: PipelineBreakdown, rank: int) -> float:
    """Seconds for which reductions of ``rank`` overlap its computations."""
    own = breakdown.simulation.record.ran_by_rank[rank]
    computations = [ran for ran in own if ran.action.computes]  # One after the other.
    ends = [ran.end for ran in computations]
    hidden = 0.0
    for reduction in (ran for ran in own if ran.action.kind == "reduce"):
        for computation in computations[bisect_right(ends, reduction.start) :]:
            if computation.start >= reduction.end:
                break
            hidden += min(reduction.end, computation.end) - max(reduction.start, computation.start)
    return hidden


def busiest_rank(breakdown: PipelineBreakdown) -> int:
    """The pipeline rank with the longest cost breakdown."""
    totals = [sum(line.seconds for line in rank_lines(breakdown, rank)) for rank in range(breakdown.schedule.stages)]
    return max(range(len(totals)), key=totals.__getitem__)


def staged_lines(breakdown: PipelineBreakdown, make: Callable[[CostLine], PlanLine]) -> tuple[PlanLine, ...]:
    """Every line of every rank, written by ``make``, with its stage. A received value has the name of its node, as
    everywhere: not that of the node that receives it, which names results by number."""
    received = {node.name for chunk in breakdown.chunks for node in chunk.graph.placeholders("receive")}
    every = ((rank, line) for rank in range(breakdown.schedule.stages) for line in rank_lines(breakdown, rank))
    return tuple(
        replace(make(line.named(sent_node(line.name)) if line.name in received else line), stage=rank)
        for rank, line in every
    )


def new_strategies(solution: PipelineSolution) -> dict[str, Strategy]:
    """The choices of nodes that only the cut graph has, sums of partial gradients and copies for other chunks, and of
    nodes on another mesh than the largest."""
    uncut = {} if solution.pipeline.meshes else solution.uncut.assignment.strategies
    return {
        name: strategy
        for chunk in solution.breakdown.chunks
        for name, strategy in chunk.assignment.strategies.items()
        # A chunk that recomputes has no nodes for what it would have saved.
        if name not in uncut and name in chunk.graph and chunk.graph[name].op != "receive"
    }


def new_nodes(solution: PipelineSolution, uncut: Mapping[str, PlanNode]) -> dict[str, PlanNode]:
    """The nodes that only the cut graph has. ``uncut``: those of the uncut graph."""
    return {
        name: node
        for chunk in solution.breakdown.chunks
        for name, node in plan_nodes(chunk.graph).items()
        if name not in uncut and node.op != "receive"
    }


def gradient_values(solution: PipelineSolution) -> dict[str, str]:
    """The values of each gradient, by parameter: one for each chunk that computes a part of it, joined by commas."""
    by_path: dict[str, list[str]] = {}
    for chunk in solution.breakdown.chunks:
        for path, value in chunk.graph.gradients.items():
            by_path.setdefault(path, []).append(str(value).removeprefix("%"))
    return {path: ",".join(dict.fromkeys(values)) for path, values in by_path.items()}


def staged_holdings(solution: PipelineSolution) -> tuple[ResidentTensor, ...]:
    """The tensors that rest on the fullest rank's devices; a saved activation once for each microbatch in flight."""
    return tuple(rank_holdings(solution, solution.breakdown.fullest))


def rank_holdings(solution: PipelineSolution, rank: int, prices: Prices | None = None) -> Iterator[ResidentTensor]:
    """The tensors that rest on the devices of ``rank``, or on those whose bytes count in ``prices``."""
    for step in rank_steps(solution, rank, prices or solution.prices[rank]):
        yield from holdings(step)


def rank_steps(solution: PipelineSolution, rank: int, prices: Prices) -> Iterator[PlacedStep]:
    """The steps of the chunks of ``rank``, with ``prices``."""
    breakdown, optimizer = solution.breakdown, solution.optimizer
    most, shared = (
        in_flight_at_peak(breakdown.chunks, breakdown.schedule, solution.prices, optimizer),
        shared_parameters(breakdown.chunks, breakdown.schedule.placement, solution.cluster),
    )
    for index in breakdown.schedule.held[rank]:
        repeats = Repeats(breakdown.schedule.microbatches, most[index], accumulates=True)
        chunk = breakdown.chunks[index]
        yield PlacedStep(chunk.graph, chunk.assignment, prices, optimizer, repeats, shared[index])
