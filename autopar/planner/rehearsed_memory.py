"""The memory of a planned step to the byte, by rehearsing its program (:mod:`autopar.runtime.rehearse.rehearsal`).

The placement program adds up everything that rests at any time, which is what a step in microbatches holds. A step of
one pass holds less: gradients come as activations go. The plan lists what is live at the memory peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE
from autopar.ir.plan_record import ResidentTensor
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.overlap import overlap
from autopar.placement.formulation import Instance
from autopar.placement.memory_bound import HostMemory, Memory, host_memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import BUCKET_BYTES
from autopar.runtime.rehearse.rehearsal import Footprint, rehearse

# An update of one parameter makes this many tensors like it on its way, where it is not fused.
# By reading torch's single-tensor updates.
UPDATE_COPIES = 2


@dataclass(frozen=True)
class ExactMemory:
    """``memory`` at its peak with the ``holdings`` that are there then; None if it could not be rehearsed."""

    memory: Memory | None
    holdings: tuple[ResidentTensor, ...]
    warnings: tuple[str, ...] = ()


def exact_memory(
    graph: Graph, assignment: Assignment, instance: Instance, holdings: tuple[ResidentTensor, ...]
) -> ExactMemory:
    """The memory of the step that runs ``graph`` (with what is recomputed) once; ``holdings`` are all there ever are.
    Of other steps nothing is rehearsed."""
    if instance.repeats != ONCE or not graph.gradients:
        return ExactMemory(None, holdings)
    prices = instance.prices
    job = Lowering(graph, assignment, (0,) * len(prices.mesh), prices.path, BUCKET_BYTES)
    try:
        found = rehearse(overlap(lower(job, graph.outputs)), prices.cluster.backend)
    except Exception as error:  # Any operation may have no form for tensors without data.
        said = f"memory is an upper bound: the step could not be rehearsed ({reason_of(error)})"
        return ExactMemory(None, holdings, (said,))
    host = host_memory(PlacedStep(graph, assignment, prices, instance.optimizer))
    return of_step({node.name: node.target for node in graph.placeholders("param")}, found, holdings, host)


def reason_of(error: Exception) -> str:
    """Why a rehearsal failed, on one line."""
    return str(error).splitlines()[-1] if str(error) else type(error).__name__


def of_step(
    targets: Mapping[str, str], found: Footprint, holdings: tuple[ResidentTensor, ...], host: HostMemory
) -> ExactMemory:
    """The memory of a step whose program leaves ``found``; ``targets``: the path of each parameter's node; ``host``:
    the optimizer state in host memory."""
    states = sum(h.bytes for h in holdings if h.kind == "optimizer")
    update = UPDATE_COPIES * max((h.bytes for h in holdings if h.kind == "gradient"), default=0) + host.largest
    if found.stored + found.accumulated + update > found.peak:
        kept = [h for h in holdings if h.kind in ("weight", "gradient", "optimizer")]
        return _balanced(kept, found.stored + found.accumulated + update + states, host)
    kept = [h for h in holdings if h.kind in ("weight", "optimizer")]
    kept += _alive(targets, found, holdings)
    return _balanced(kept, found.peak + states, host)


def _alive(
    targets: Mapping[str, str], found: Footprint, holdings: tuple[ResidentTensor, ...]
) -> Iterator[ResidentTensor]:
    """The gradients and activations among ``holdings`` that are there at the peak, with the bytes they have then."""
    held = dict(found.held)
    for holding in holdings:
        name = targets[holding.name] if holding.kind == "gradient" else holding.name
        count = held.pop((holding.kind, name), 0)
        if count:
            yield replace(holding, bytes=count)
        elif holding.kind == "input" and found.inputs:
            yield holding


def _balanced(holdings: Iterable[ResidentTensor], peak: int, host: HostMemory) -> ExactMemory:
    """Whatever is no holding is temporary."""
    kept = tuple(holdings)
    parts = {kind: sum(h.bytes for h in kept if h.kind == kind) for kind in {h.kind for h in kept}}
    temporary = max(peak - sum(parts.values()), 0)
    memory = Memory(
        weights=parts.get("weight", 0),
        gradients=parts.get("gradient", 0),
        optimizer=parts.get("optimizer", 0),
        activations=parts.get("activation", 0),
        temporary=temporary,
        inputs=parts.get("input", 0),
        host=host.bytes,
    )
    return ExactMemory(memory, kept)
