"""The prices of a pipeline as a plan records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cluster.description import Cluster
from autopar.cost.pipeline.prices import ChunkPrice
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.placements import Placements
from autopar.ir.planned_pipeline import ChunkFigures, LinkFigures, PlannedPipeline
from autopar.ir.stage_meshes import StageMeshes
from autopar.ir.staged_graph import Edge
from autopar.placement.prices import Prices
from autopar.search.schedules.chunks import edge_bytes

from .pipeline_breakdown import PipelineBreakdown


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
