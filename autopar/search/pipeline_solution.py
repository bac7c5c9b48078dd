"""A solved pipeline, and its prices as a plan records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.cluster.description import Cluster
from autopar.cost.pipeline.prices import ChunkPrice
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.placements import Placements
from autopar.ir.planned_pipeline import ChunkFigures, LinkFigures, PlannedPipeline
from autopar.ir.stage_meshes import StageMeshes
from autopar.ir.staged_graph import Edge
from autopar.placement.prices import Prices
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.steps.exact_memory import is_rehearsed
from autopar.search.schedules.chunks import edge_bytes
from autopar.search.stage_prices.pipeline_breakdown import PipelineBreakdown

from .stage_devices import prices_on_blocks
from .stage_meshes import StageLayout


@dataclass(frozen=True)
class PipelineSolution:
    """A cut, placed and scheduled graph. ``solutions`` are those of the placement program for the uncut graph of one
    microbatch, by pipeline rank: one and the same where stages have equal meshes. ``cluster``: of all ranks.
    ``measured``: what has been measured of it, by name; a changed solution begins with nothing."""

    layout: StageLayout
    solutions: tuple[MeshSolution, ...]
    cluster: Cluster
    breakdown: PipelineBreakdown
    pipeline: PlannedPipeline
    measured: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def seconds(self) -> float:
        return self.breakdown.seconds

    @property
    def uncut(self) -> MeshSolution:
        """The solution on the largest mesh, of the first such rank."""
        return max(self.solutions, key=lambda solution: solution.prices.devices)

    @property
    def prices(self) -> tuple[Prices, ...]:
        """By pipeline rank, those of its own devices."""
        return prices_on_blocks(self.solutions)

    @property
    def optimizer(self) -> str:
        return self.uncut.instance.optimizer

    @property
    def is_one_step(self) -> bool:
        """Whether its program is that of a whole step, one microbatch after the other, which is rehearsed."""
        is_whole = self.layout.stages == 1 and self.breakdown.schedule.name == "1f1b"
        return is_whole and is_rehearsed(self.uncut.instance)


def planned_pipeline(
    cuts: tuple[str, ...],
    breakdown: PipelineBreakdown,
    wires: Mapping[Edge, Placements],
    prices: Sequence[Prices],
    own_statistics: bool,
    cluster: Cluster,
) -> PlannedPipeline:
    """The pipeline of a cost breakdown as a plan records it, with enough figures to simulate the step again.
    ``prices``: by pipeline rank."""
    meshes = StageMeshes(tuple(own.mesh for own in prices))
    chunks = tuple(map(_chunk_figures, breakdown.prices.chunks))
    links = tuple(
        LinkFigures(source, target, p.bytes_of("forward"), p.bytes_of("backward"), p.bandwidth, p.latency)
        for (source, target), p in sorted(breakdown.prices.edges.items())
    )
    shared = breakdown.prices.shared
    return PlannedPipeline(
        cuts=cuts,
        schedule=breakdown.schedule,
        wires=wires,
        wire_bytes=edge_bytes(breakdown.chunks, wires),
        chunk_figures=chunks,
        link_figures=links,
        peaks=breakdown.peaks,
        update_seconds=breakdown.prices.step,
        hides=breakdown.prices.hides,
        hosts=shared.hosts if shared else (),
        speeds=shared.speeds if shared else (),
        own_statistics=own_statistics,
        devices=tuple(own.cluster.device.name for own in prices) if cluster.groups else (),
        meshes=() if meshes.are_equal else meshes.meshes,
        borrowed={} if meshes.are_equal else _borrowed(breakdown),
    )


def _borrowed(breakdown: PipelineBreakdown) -> dict[tuple[int, str], ParameterPlacement]:
    """Where the chunks that use a parameter have it on another mesh than its owner's, or otherwise than its owner on a
    mesh of the same form: that of another kind of device."""
    owners: dict[str, tuple[tuple[int, ...], ParameterPlacement]] = {}
    found: dict[tuple[int, str], ParameterPlacement] = {}
    for chunk in breakdown.chunks:
        for node in chunk.graph.placeholders("param"):
            here = chunk.assignment.mesh, chunk.assignment.parameters[node.name]
            if owners.setdefault(node.target, here) != here:
                found[chunk.index, node.target] = here[1]
    return found


def _chunk_figures(price: ChunkPrice) -> ChunkFigures:
    return ChunkFigures(
        forward=price.forward,
        input_gradient=price.input_gradient,
        weight_gradient=price.weight_gradient,
        reduce=price.reduce,
        saved=price.until_weight_gradient,
        resting=price.static,
        joined=price.input_gradient + price.weight_gradient - price.whole_backward,
        overlap_half=price.overlap_weight_gradient,
        overlap_whole=price.overlap_backward,
        unawaited=price.unawaited,
    )
