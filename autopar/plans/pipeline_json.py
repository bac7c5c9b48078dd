"""The pipeline of a plan as plain data, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.placements import Placements, short
from autopar.ir.planned_pipeline import ChunkFigures, LinkFigures, PlannedPipeline
from autopar.ir.staged_graph import Edge
from autopar.offload import tier_of
from autopar.schedule.schedule import Schedule


def pipeline_to_data(pipeline: PlannedPipeline) -> dict[str, Any]:
    """The pipeline as plain data: dicts, lists, strings and numbers that JSON can hold."""
    wires = [
        [e.source, e.target, e.name, short(place), pipeline.wire_bytes.get(e, 0)]
        for e, place in sorted(pipeline.wires.items())
    ]
    # Earlier versions of autopar do not know these.
    unequal = {"limits": list(pipeline.limits), "devices": list(pipeline.devices)} if pipeline.devices else {}
    return {
        "cuts": list(pipeline.cuts),
        "schedule": pipeline.schedule.to_json(),
        "wires": wires,
        "chunk_figures": [_numbers(figures) for figures in pipeline.chunk_figures],
        "link_figures": [_numbers(figures) for figures in pipeline.link_figures],
        "peaks": list(pipeline.peaks),
        "update_seconds": pipeline.update_seconds,
        "hides": pipeline.hides,
        "hosts": list(pipeline.hosts),
        "speeds": list(pipeline.speeds),
        "own_statistics": pipeline.own_statistics,
        **unequal,
        **_meshes_to_data(pipeline),
    }


def _meshes_to_data(pipeline: PlannedPipeline) -> dict[str, Any]:
    """What only stages with unequal meshes have."""
    if not pipeline.meshes:
        return {}
    borrowed = [
        [chunk, path, *map(short, (place.weight, place.gradient, place.optimizer)), place.offload]
        for (chunk, path), place in sorted(pipeline.borrowed.items())
    ]
    return {"meshes": [list(mesh) for mesh in pipeline.meshes], "borrowed": borrowed}


def _numbers(figures: ChunkFigures | LinkFigures) -> list[Any]:
    return [float(value) if math.isfinite(value) else str(value) for value in astuple(figures)]


def pipeline_from_data(data: Any, places: Callable[[str], Placements]) -> PlannedPipeline:
    """The inverse of :func:`pipeline_to_data`; ``places`` parses placements. Raises ``ValueError``, ``TypeError`` or
    ``KeyError`` if ``data`` is not a pipeline."""
    edges = [(Edge(int(s), int(t), str(name)), text, int(n)) for s, t, name, text, n in data["wires"]]
    return PlannedPipeline(
        cuts=tuple(map(str, data["cuts"])),
        schedule=Schedule.from_json(data["schedule"]),
        wires={edge: places(text) for edge, text, _ in edges},
        wire_bytes={edge: count for edge, _, count in edges},
        chunk_figures=tuple(ChunkFigures(*map(float, row)) for row in data["chunk_figures"]),
        link_figures=tuple(
            LinkFigures(int(source), int(target), *map(float, row)) for source, target, *row in data["link_figures"]
        ),
        peaks=tuple(map(int, data["peaks"])),
        update_seconds=float(data["update_seconds"]),
        hides=bool(data.get("hides", False)),
        hosts=tuple(map(int, data.get("hosts", ()))),
        speeds=tuple(map(float, data.get("speeds", ()))),
        own_statistics=bool(data.get("own_statistics", False)),
        limits=tuple(map(int, data.get("limits", ()))),
        devices=tuple(map(str, data.get("devices", ()))),
        meshes=tuple(tuple(map(int, mesh)) for mesh in data.get("meshes", ())),
        borrowed={
            (int(chunk), str(path)): ParameterPlacement(
                places(weight), places(gradient), places(optimizer), tier_of(tier)
            )
            for chunk, path, weight, gradient, optimizer, tier in data.get("borrowed", ())
        },
    )
