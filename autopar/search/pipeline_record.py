"""The prices of a pipeline as a plan records them."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.pipeline.prices import ChunkPrice
from autopar.ir.placements import Placements
from autopar.ir.planned_pipeline import ChunkFigures, LinkFigures, PlannedPipeline
from autopar.ir.staged_graph import Edge
from autopar.placement.prices import Prices, local_bytes

from .pipeline_breakdown import PipelineBreakdown


def planned_pipeline(
    cuts: tuple[str, ...],
    breakdown: PipelineBreakdown,
    wires: Mapping[Edge, Placements],
    prices: Prices,
    own_statistics: bool,
) -> PlannedPipeline:
    """The pipeline of a cost breakdown as a plan records it, with enough figures to simulate the step again."""
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
        wire_bytes=_wire_bytes(breakdown, wires, prices),
        chunk_figures=chunks,
        link_figures=links,
        peaks=breakdown.peaks,
        update_seconds=breakdown.prices.step,
        hides=breakdown.prices.hides,
        hosts=shared.hosts if shared else (),
        speeds=shared.speeds if shared else (),
        own_statistics=own_statistics,
        devices=_device_names(prices, breakdown.schedule.stages),
    )


def _device_names(prices: Prices, stages: int) -> tuple[str, ...]:
    if not prices.cluster.groups:
        return ()
    return tuple(prices.on_block(stage).cluster.device.name for stage in range(stages))


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


def _wire_bytes(breakdown: PipelineBreakdown, wires: Mapping[Edge, Placements], prices: Prices) -> dict[Edge, int]:
    received = [{n.target: n.type for n in chunk.graph.placeholders("receive")} for chunk in breakdown.chunks]
    return {edge: local_bytes(received[edge.target][edge.name], place, prices.mesh) for edge, place in wires.items()}
