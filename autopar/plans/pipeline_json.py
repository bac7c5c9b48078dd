"""The pipeline of a plan as plain data, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from typing import Any

from autopar.errors import OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.module_paths import did_you_mean
from autopar.ir.placements import Placements, short
from autopar.ir.planned_pipeline import ChunkFigures, LinkFigures, PlannedPipeline
from autopar.ir.staged_graph import Edge
from autopar.offload import tier_of
from autopar.schedule.schedule import Schedule

from .entries import count, counts, flag, number, one, rows, shown, text, texts


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
    """The inverse of :func:`pipeline_to_data`; ``places`` parses placements. Raises :class:`OptionsError` that names
    what is wrong."""
    if not isinstance(data, Mapping):
        raise OptionsError(f"pipeline is {shown(data)}, not a table")
    unknown = [name for name in data if name not in (*_REQUIRED, *_LATER)]
    if unknown:
        raise OptionsError(f"a plan has no field {f'pipeline.{unknown[0]}'!r}{did_you_mean(unknown[0], _REQUIRED)}")
    lacking = [name for name in _REQUIRED if name not in data]
    if lacking:
        raise OptionsError(f"pipeline.{lacking[0]} is missing")
    wired = rows("pipeline.wires", data["wires"], "[source, target, name, placement, bytes]", partial(_wire, places))
    lent = rows("pipeline.borrowed", data.get("borrowed", ()), _BORROWED, partial(_borrowed, places))
    alike: dict[str, Any] = {name: one(f"pipeline.{name}", data.get(name, False), "a flag", flag) for name in _FLAGS}
    alike |= {name: texts(f"pipeline.{name}", data.get(name, ())) for name in ("cuts", "devices")}
    alike |= {name: counts(f"pipeline.{name}", data.get(name, ())) for name in ("peaks", "hosts", "limits")}
    return PlannedPipeline(
        schedule=one("pipeline.schedule", data["schedule"], "a schedule", Schedule.from_json),
        wires={edge: place for edge, place, _ in wired},
        wire_bytes={edge: size for edge, _, size in wired},
        chunk_figures=rows("pipeline.chunk_figures", data["chunk_figures"], "numbers of a chunk", _chunk),
        link_figures=rows("pipeline.link_figures", data["link_figures"], "numbers of a link", _link),
        update_seconds=one("pipeline.update_seconds", data["update_seconds"], "seconds", number),
        speeds=rows("pipeline.speeds", data.get("speeds", ()), "a number", number),
        meshes=rows("pipeline.meshes", data.get("meshes", ()), "a mesh", lambda mesh: tuple(map(count, mesh))),
        borrowed=dict(lent),
        **alike,
    )


_REQUIRED = ("cuts", "schedule", "wires", "chunk_figures", "link_figures", "peaks", "update_seconds")
_FLAGS = ("hides", "own_statistics")
# What files of earlier versions of autopar lack, and what only some plans have.
_LATER = (*_FLAGS, "hosts", "speeds", "limits", "devices", "meshes", "borrowed")
_BORROWED = "[chunk, parameter, weight, gradient, optimizer state, where the state rests]"
_Places = Callable[[str], Placements]


def _wire(places: _Places, row: Any) -> tuple[Edge, Placements, int]:
    source, target, name, place, size = row
    return Edge(count(source), count(target), text(name)), places(place), count(size)


def _borrowed(places: _Places, row: Any) -> tuple[tuple[int, str], ParameterPlacement]:
    chunk, path, weight, gradient, optimizer, tier = row
    resting = ParameterPlacement(places(weight), places(gradient), places(optimizer), tier_of(tier))
    return (count(chunk), text(path)), resting


def _chunk(row: Any) -> ChunkFigures:
    return ChunkFigures(*map(number, row))


def _link(row: Any) -> LinkFigures:
    source, target, *figures = map(number, row)
    if not (source.is_integer() and target.is_integer()):
        raise OptionsError(f"{source} and {target} are no chunks")
    return LinkFigures(int(source), int(target), *figures)
