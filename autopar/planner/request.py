"""What a plan is asked for, and what follows from it: meshes to try, and limits of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster.description import Cluster
from autopar.cost import usable_bytes, usable_host_bytes
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats
from autopar.options import Options


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for: the normalised ``graph`` (symbolic in the batch), its ``loss`` output, the ``batch``
    size, the hardware and the options. ``model`` describes it for people. ``repeats``, ``memory_limit`` and
    ``host_limit`` are those of one placement program of a search over stages; ``notes`` become warnings of the plan."""

    graph: Graph
    loss: str | None
    batch: int
    mesh: tuple[int, ...]
    cluster: Cluster
    options: Options
    model: str = "model"
    axis_names: tuple[str, ...] = ()
    repeats: Repeats = ONCE
    memory_limit: float | None = None
    host_limit: float | None = None
    notes: tuple[str, ...] = ()


def axes_are_fixed(request: PlanRequest) -> bool:
    """Whether the axes of the mesh are spoken of, so that they cannot be regrouped."""
    return not request.options.mesh_search or bool(request.options.pins) or bool(request.axis_names)


def mesh_candidates(request: PlanRequest) -> list[tuple[int, ...]]:
    """The mesh as given; if it has one axis and may be regrouped, its devices split into two axes every way. Placements
    that coincide on both axes make them one, so that the single axis is among them."""
    given = request.mesh
    devices = math.prod(given)
    splits: list[tuple[int, ...]] = [(k, devices // k) for k in range(2, devices) if devices % k == 0]
    return [given] if axes_are_fixed(request) or len(given) > 1 or not splits else splits


def memory_limit_of(request: PlanRequest) -> int:
    """Bytes a device may use: as asked, or what the cluster's device leaves after its reserve."""
    return int(request.memory_limit or request.options.memory_limit or usable_bytes(request.cluster))


def host_limit_of(request: PlanRequest) -> float:
    """Bytes of host memory for each device that a plan may use."""
    return request.host_limit if request.host_limit is not None else usable_host_bytes(request.cluster)
