"""The cost breakdown of a placed step, line by line. The solver's objective is the sum of the same lines.

Lines are computed from the whole graph, not from the solver's arrays, so comparing the objective with the sum of lines
is a real check.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.ir.assignment import Assignment, Use, moved_operands, moves, overlaps_backward
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Phase, Value
from autopar.ir.placements import Placements
from autopar.ir.plan_record import LOSS_SCALE, LineKind
from autopar.ir.reshard import Collective, Hop, Sent, make_hop

from .fused_kernels import FusedKernels
from .item_prices import (
    adding_seconds,
    agreement_seconds,
    offload_seconds,
    optimizer_seconds,
    swap_seconds,
    weight_swap_seconds,
    working_copy_seconds,
)
from .memory_bound import Memory, memory
from .overlap_windows import OverlapWindow, Priced, seconds_of_sections, windows_of
from .placed_step import PlacedStep, phases_of, trained


class CostLine(NamedTuple):
    """One priced item: the node ``name`` that is computed or that exchanges rows, or the value ``name`` that is
    moved by ``hops``. It occurs ``times`` times in a step, and takes ``seconds`` in all. A ``hidden`` line is negative:
    it subtracts messages that overlap computation."""

    kind: LineKind
    name: str
    module: str
    phase: Phase
    seconds: float
    hops: tuple[Hop, ...] = ()
    times: int = 1

    def named(self, name: str) -> CostLine:
        """The line with another name."""
        return CostLine(self.kind, name, self.module, self.phase, self.seconds, self.hops, self.times)

    def of_several(self, count: int) -> CostLine:
        """The line of so many items like it."""
        seconds = self.seconds * count
        return CostLine(self.kind, self.name, self.module, self.phase, seconds, self.hops, self.times)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(hop.collective for hop in self.hops if hop.collective is not None)


@dataclass(frozen=True)
class CostBreakdown:
    """All lines of a step, and its memory."""

    lines: tuple[CostLine, ...]
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    def seconds_of(self, *kinds: LineKind) -> float:
        return sum(line.seconds for line in self.lines if line.kind in kinds)


def cost_breakdown(
    step: PlacedStep,
    agreement: float | None = None,
    windows: Sequence[OverlapWindow] | None = None,
    section_of: Callable[[Priced], str] = lambda line: line.phase,
    held: Memory | None = None,
) -> CostBreakdown:
    """The cost breakdown of a placed step.

    Args:
        agreement: seconds of the agreement on overflow to include; None: those of a step of this graph alone.
        windows: overlap windows of the sections that ``section_of`` returns; None: those of a step of this graph alone.
        held: the memory of the step, if it is known.
    """
    agreeing = agreement_seconds(step.prices, (step.graph,)) if agreement is None else agreement
    lines = (
        *_compute_lines(step),
        *_use_lines(step),
        *_optimizer_lines(step),
        *([CostLine("optimizer", LOSS_SCALE, "", "backward", agreeing)] if agreeing else []),
        *_shared_parameter_lines(step),
        *_swap_lines(step),
    )
    if step.counts:
        lines = tuple(line.of_several(step.count_of(line.name)) for line in lines)
    if windows is None:
        windows = windows_of(step.graph, step.prices.cluster, step.repeats)
    hidden = hidden_lines(lines, windows, section_of)
    return CostBreakdown((*lines, *hidden), memory(step) if held is None else held)


def _compute_lines(step: PlacedStep) -> Iterator[CostLine]:
    prices, times, strategies = step.prices, step.repeats.microbatches, step.assignment.strategies
    gradients = {output.value for output in step.graph.outputs if output.kind == "gradient"}
    accumulating = {value.node for value in gradients if value is not None} if times > 1 else set[str]()
    known: dict[Hashable, tuple[tuple[Hop, ...], float, float]] = {}
    for node in step.graph.nodes:
        if not node.is_placeholder and node.op != SAVED_ACTIVATION:
            strategy, name = strategies[node.name], node.name
            # One price for the nodes of a class that choose alike: deep models have few.
            key = step.graph.classes.get(name, name), id(strategy), prices.fused and prices.fused.entry(name)
            if key not in known:
                inputs = tuple(map(step.graph.type_of, node.operands))
                hops, exchange = prices.exchange(node, inputs, strategy)
                known[key] = hops, exchange, prices.node(node, inputs, strategy) - exchange
            hops, exchange, seconds = known[key]
            adding = 0.0
            if name in accumulating:
                inputs = tuple(map(step.graph.type_of, node.operands))
                adding = adding_seconds(prices, node, inputs, strategy, gradients, step.repeats)
            yield CostLine("compute", name, node.module, node.phase, seconds * times + adding, (), times)
            if hops:
                yield CostLine("exchange", name, node.module, node.phase, exchange * times, hops, times)


def _use_lines(step: PlacedStep) -> Iterator[CostLine]:
    graph, assignment, prices = step.graph, step.assignment, step.prices
    reshards, operands = moves(graph, assignment)
    broken = _inside_kernels(operands, prices.fused)
    known: dict[Hashable, tuple[tuple[Hop, ...], float]] = {}
    for use in reshards:
        bucketed = use.role in ("gradient", "refresh")
        is_weight = use.value.node in assignment.parameters
        sent: Sent = "bucketed" if bucketed else use.phase if is_weight else "alone"
        if use.role == "output" and overlaps_backward(graph, use.value):
            direct = make_hop(use.kind, use.source, use.target, prices.mesh)
            hops = (direct,) if direct is not None else prices.table(use.kind, sent=sent).path(use.source, use.target)
            seconds = 0.0
        else:
            key = use.kind, sent, id(use.source), id(use.target)  # Of the assignment, which keeps them.
            if key not in known:
                table = prices.table(use.kind, sent=sent)
                known[key] = table.path(use.source, use.target), table.cost(use.source, use.target)
            hops, seconds = known[key]
        kind: LineKind = "reshard"
        if bucketed:
            kind = use.role  # type: ignore[assignment]
        elif is_weight:
            kind = "weight"
        module = graph[use.value.node].module or graph[use.consumer].module if use.consumer in graph else ""
        if broken and use.role == "operand" and (use.value, use.phase, use.target) in broken:
            seconds += prices.broken(use.kind, use.source, use.target)
        times = 1 if bucketed else step.repeats.microbatches
        yield CostLine(kind, use.value.node, module, use.phase, seconds * times, hops, times)


def broken_kernels(
    graph: Graph, assignment: Assignment, fused: FusedKernels | None
) -> Set[tuple[Value, Phase, Placements]]:
    """The values that are resharded inside a kernel, with the phase and the placements in which they are needed."""
    return _inside_kernels(moved_operands(graph, assignment), fused)


def _inside_kernels(moved: Iterable[Use], fused: FusedKernels | None) -> Set[tuple[Value, Phase, Placements]]:
    if fused is None:
        return frozenset()
    return frozenset((use.value, use.phase, use.target) for use in moved if fused.is_inside(use.value, (use.consumer,)))


def _optimizer_lines(step: PlacedStep) -> Iterator[CostLine]:
    prices, optimizer = step.prices, step.optimizer
    updated = set(trained(step.graph)) - set(step.shared_parameters)
    for node in step.graph.placeholders("param"):
        place = step.assignment.parameters[node.name]
        seconds = working_copy_seconds(prices, node, place)
        if node.target in updated:
            seconds += optimizer_seconds(prices, node, place, optimizer)
        if node.target in updated or seconds:
            yield CostLine("optimizer", node.name, node.target.rpartition(".")[0], "backward", seconds)
        moving = offload_seconds(prices, node, place, optimizer) if node.target in updated else 0.0
        if moving:
            yield CostLine("offload", node.name, node.target.rpartition(".")[0], "backward", moving)


def _swap_lines(step: PlacedStep) -> Iterator[CostLine]:
    for node in step.graph.nodes:
        if node.name in step.assignment.offloaded and node.name in step.graph.kept:
            seconds = swap_seconds(step.prices, node, step.assignment.strategies[node.name], step.repeats)
            # Both ways are paid in equal parts: out in forward, and back in backward.
            for phase in ("forward", "backward"):
                yield CostLine("swap", node.name, node.module, phase, seconds / 2, (), step.repeats.microbatches)
    phases = phases_of(step.graph)
    for node in step.graph.placeholders("param"):
        if node.name in step.assignment.offloaded:
            place = step.assignment.parameters[node.name]
            seconds = weight_swap_seconds(step.prices, node, place, step.repeats, phases)
            module = node.target.rpartition(".")[0]
            both: tuple[Phase, ...] = ("forward", "backward")
            for phase in both[:phases]:
                yield CostLine("swap", node.name, module, phase, seconds / phases, (), step.repeats.microbatches)


def _shared_parameter_lines(step: PlacedStep) -> Iterator[CostLine]:
    for path, shared in step.shared_parameters.items():
        if shared.seconds:
            yield CostLine(
                "refresh", step.graph.parameters[path].name, path.rpartition(".")[0], "forward", shared.seconds
            )


def hidden_lines(
    lines: Sequence[CostLine], windows: Iterable[OverlapWindow], section_of: Callable[[Priced], str]
) -> Iterator[CostLine]:
    """What ``lines`` hide in ``windows``, each of some of the sections of which a line is one."""
    sides = seconds_of_sections(lines, section_of)
    reductions = sum(line.seconds for line in lines if line.kind == "gradient")
    for window in windows:
        seconds = window.seconds(sides, reductions)
        if seconds > 0:
            yield CostLine("hidden", window.name, "", window.phase, -seconds)
