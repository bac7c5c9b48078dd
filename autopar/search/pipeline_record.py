"""What a plan keeps of the prices of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.pipeline.prices import ChunkPrice
from autopar.ir.placements import Placements
from autopar.ir.planned_pipeline import ChunkFigures, LinkFigures, PlannedPipeline
from autopar.ir.staged_graph import Edge
from autopar.placement.prices import Prices, local_bytes

from .pipeline_bill import StageBill


def planned_pipeline(
    cuts: tuple[str, ...], bill: StageBill, wires: Mapping[Edge, Placements], prices: Prices
) -> PlannedPipeline:
    """The pipeline of a bill as a plan keeps it: enough to simulate the step again."""
    chunks = tuple(map(_chunk_figures, bill.prices.chunks))
    links = tuple(
        LinkFigures(source, target, p.bytes_of("forward"), p.bytes_of("backward"), p.bandwidth, p.latency)
        for (source, target), p in sorted(bill.prices.edges.items())
    )
    shared = bill.prices.shared
    return PlannedPipeline(
        cuts=cuts,
        schedule=bill.schedule,
        wires=wires,
        wire_bytes=_wire_bytes(bill, wires, prices),
        chunk_figures=chunks,
        link_figures=links,
        peaks=bill.peaks,
        update_seconds=bill.prices.step,
        hides=bill.prices.hides,
        hosts=shared.hosts if shared else (),
        speeds=shared.speeds if shared else (),
    )


def _chunk_figures(price: ChunkPrice) -> ChunkFigures:
    return ChunkFigures(
        forward=price.forward,
        input_gradient=price.input_gradient,
        weight_gradient=price.weight_gradient,
        reduce=price.reduce,
        saved=price.until_weight_gradient,
        resting=price.static,
        joined=price.input_gradient + price.weight_gradient - price.whole_backward,
        beside_half=price.beside_weight_gradient,
        beside_whole=price.beside_backward,
        unawaited=price.unawaited,
    )


def _wire_bytes(bill: StageBill, wires: Mapping[Edge, Placements], prices: Prices) -> dict[Edge, int]:
    received = [{n.target: n.type for n in chunk.graph.placeholders("receive")} for chunk in bill.chunks]
    return {edge: local_bytes(received[edge.target][edge.name], place, prices.mesh) for edge, place in wires.items()}
