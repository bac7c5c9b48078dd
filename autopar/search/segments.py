"""The segments of a graph between places where it may be cut, priced from the cost breakdown of the uncut graph."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import RECOMPUTED, SAVED_ACTIVATION, VIEWS, Value, original
from autopar.ir.plan_record import ONCE_A_STEP
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.cut_candidates import CutCandidate
from autopar.passes.pipeline.data_only import data_only_nodes
from autopar.passes.pipeline.first_chunks import first_chunks
from autopar.passes.pipeline.repeated import copies_in_backward
from autopar.placement.breakdown import CostBreakdown, CostLine
from autopar.placement.constraints import unmatched
from autopar.placement.item_prices import temporary_bytes
from autopar.placement.memory_bound import held_bytes, recomputed_of
from autopar.placement.overlap_windows import hidden_gathers
from autopar.placement.prices import Prices
from autopar.planner.mesh_solution import MeshSolution
from autopar.search.schedules.chunks import WirePrice
from autopar.search.schedules.cuts import Segments
from autopar.solver.problem import Floats, Ints


class PinnedTogetherError(OptionsError):
    """Two pins put modules on different stages that the given cuts do not separate."""


STAGE_PIN = re.compile(r"^\s*stage\s*[= ]\s*(\d+)\s*$")


def segment_of_nodes(graph: Graph, candidates: tuple[CutCandidate, ...]) -> dict[str, int]:
    """For each node of ``graph`` (one microbatch, without nodes for saved activations), the segment it runs in.
    Backward nodes run in the segments of their forward nodes, and what every chunk repeats that reads it, such as a
    view, in the first of these."""
    cuts = tuple(candidate.name for candidate in candidates)
    first = first_chunks(graph, cuts) if cuts else None
    segments = _segments_of_chunks(graph, cuts) if first is None else first
    copies = copies_in_backward(graph)
    for node in reversed(graph.nodes):
        # A copy that no chunk between candidates has, since all receive the value, runs where that is computed.
        if node.phase == "backward" and node.name not in segments and not node.is_placeholder:
            users = (user.name for user, _ in graph.users.get(Value(node.name), ()))
            of = [copies[node.name]] if node.name in copies else users
            known = [segments[name] for name in of if name in segments]
            segments |= {node.name: min(known)} if known else {}
    return segments


def _segments_of_chunks(graph: Graph, cuts: tuple[str, ...]) -> dict[str, int]:
    """As :func:`segment_of_nodes`, by cutting the graph."""
    finest, segments = cut(graph, cuts), dict[str, int]()
    for index, chunk in enumerate(finest.chunks):
        for node in chunk.nodes:
            if node.op != "receive":
                segments.setdefault(original(node.name, graph), index)
    return segments


def price_segments(
    graph: Graph,
    candidates: tuple[CutCandidate, ...],
    segment_of: Mapping[str, int],
    uncut: MeshSolution,
    prices: Prices,
    breakdown: CostBreakdown,
    link: WirePrice,
) -> Segments:
    """The segments of ``graph`` between ``candidates``. ``uncut``: the solution for the graph with nodes for saved
    activations, and its ``breakdown`` on the devices in question, those of ``prices``; ``segment_of``: the result of
    :func:`segment_of_nodes`; ``link``: the slowest wire between stages. Values that cross at a candidate are assumed to
    be sharded over the whole inner mesh, which is the least they can take."""
    instance, assignment = uncut.instance, uncut.assignment
    count = len(candidates) + 1
    # Lists: their elements are added to far more often than there are segments.
    seconds, static, saved, wire, working, entering, returning = ([0.0] * count for _ in range(7))
    for line, own_seconds in seconds_of_microbatch(breakdown.lines):
        seconds[segment_at(line.name, segment_of)] += own_seconds
    away, read_in = assignment.recomputed | assignment.offloaded, _first_readers(instance.graph, segment_of)
    for node in instance.graph.nodes:
        if node.op == "param":
            static[segment_at(node.name, segment_of)] += sum(held_bytes(uncut.step.placed, node))
        elif node.op == SAVED_ACTIVATION and node.name not in away:
            size = prices.held(node.type, assignment.strategies[node.name].outputs[0])
            made = segment_at(node.operands[0].node, segment_of)
            reader = read_in.get(node.name, made)
            saved[reader] += size
            for start in range(made + 1, reader + 1):
                entering[start] -= size
        elif not node.is_placeholder and node.name in segment_of:
            kinds, own = tuple(map(instance.graph.type_of, node.operands)), segment_of[node.name]
            strategy = assignment.strategies[node.name]
            working[own] = max(working[own], temporary_bytes(prices, node, kinds, strategy))
    for position, candidate in enumerate(candidates, start=1):
        forward, backward = (
            size / instance.prices.devices for size in (candidate.forward_bytes, candidate.backward_bytes)
        )
        wire[position] = link.latency + max(forward, backward) / link.bandwidth
        entering[position], returning[position] = max(entering[position] + forward, 0.0), backward
    again = np.zeros(count)
    for own, size in recomputed_of(uncut.step.placed, lambda n: segment_at(n.operands[0].node, segment_of)).items():
        again[own] = size
    names = tuple(c.name for c in candidates)
    of_messages = _array(wire), _array(entering), _array(returning)
    return Segments(names, _array(seconds), _array(static), _array(saved), *of_messages, _array(working), again)


def seconds_of_microbatch(lines: Sequence[CostLine]) -> Iterator[tuple[CostLine, float]]:
    """The lines of every microbatch, with what one of them waits for: of gathers of weights, what is not hidden."""
    exposed = {phase: 1.0 - hidden for phase, hidden in hidden_gathers(lines).items()}
    for line in lines:
        if line.kind not in (*ONCE_A_STEP, "hidden"):
            share = exposed.get(line.phase, 1.0) if line.kind == "weight" else 1.0
            yield line, share * line.seconds / line.times


def _array(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _first_readers(graph: Graph, segment_of: Mapping[str, int]) -> dict[str, int]:
    """For each saved activation, the first segment whose backward reads it: wherever the graph is cut, the chunk with
    that segment holds it. So does a chunk that begins behind that segment and receives it."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        for value in node.operands:
            if graph[value.node].op == SAVED_ACTIVATION:
                own = segment_at(node.name, segment_of)
                found[value.node] = min(found.get(value.node, own), own)
    return found


def segment_at(name: str, segment_of: Mapping[str, int]) -> int:
    """The segment of a node of the step with saved activations and copies of what is recomputed."""
    name = name.removesuffix(RECOMPUTED)
    return segment_of.get(name, segment_of.get(name.removesuffix("_rest"), 0))


def pinned_ranks(graph: Graph, segment_of: Mapping[str, int], count: int, pins: Mapping[str, str], stages: int) -> Ints:
    """For each of ``count`` segments, the pipeline rank on which pins such as ``{"h.3": "stage 1"}`` put it, or -1.

    Raises:
        OptionsError: a pin matches nothing or names no stage, or two pins put one segment on different ranks.
    """
    ranks = np.full(count, -1, dtype=np.int64)
    pinned_by: dict[int, str] = {}
    repeated = {node.name for node in graph.nodes if node.op in VIEWS} | data_only_nodes(graph) if pins else set()
    for pattern, text in pins.items():
        rank = pinned_stage(text)
        if rank >= stages:
            there_are = f"there are {stages} stages, counted from 0" if stages > 1 else "there is one stage, stage 0"
            raise OptionsError(f"the pin {pattern!r}: {text!r}: {there_are}")
        names = _nodes_within(graph, pattern)
        if not names:
            raise _of_no_module(graph, pattern)
        # What chunks repeat, wherever it is read, binds none of them.
        for segment in {segment_of[name] for name in names if name in segment_of and name not in repeated}:
            if ranks[segment] not in (-1, rank):
                raise PinnedTogetherError(
                    f"the pins {pinned_by[segment]!r}: 'stage {ranks[segment]}' and {pattern!r}: {text!r} put modules "
                    "on different stages that cannot be cut apart"
                )
            ranks[segment] = rank
            pinned_by.setdefault(segment, pattern)
    return ranks


def _of_no_module(graph: Graph, pattern: str) -> OptionsError:
    """The error for a stage pin that matches no module that computes anything."""
    owners = sorted(n.target for n in graph.placeholders("param") if fnmatch.fnmatchcase(n.target, pattern))
    if not owners:
        return unmatched(graph, pattern)
    module = owners[0].rpartition(".")[0] or "the module that uses it"
    return OptionsError(
        f"the pin {pattern!r} names the parameter {owners[0]!r}, but stages are fixed for modules, and parameters go "
        f"where they are used: pin {module!r}"
    )


def _nodes_within(graph: Graph, pattern: str) -> list[str]:
    """The forward nodes of the modules that a pattern names, and of the modules below them."""

    def is_named(path: str) -> bool:
        parts = path.split(".")
        return any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))

    return [n.name for n in graph.nodes if n.phase == "forward" and n.module and is_named(n.module)]


def pinned_stage(text: str) -> int:
    """The number of the stage in the text of a pin that fixes one."""
    match = STAGE_PIN.match(text)
    assert match is not None
    return int(match[1])


def stage_pins(pins: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Divides ``pins`` into those that fix a stage and those that fix placements."""
    stages = {pattern: text for pattern, text in pins.items() if STAGE_PIN.match(text)}
    return stages, {pattern: text for pattern, text in pins.items() if pattern not in stages}
