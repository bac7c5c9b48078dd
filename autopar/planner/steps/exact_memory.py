"""Measures the memory of a planned step to the byte, by rehearsing its program
(:mod:`autopar.runtime.rehearse.rehearsal`).

The placement program adds up everything that is stored at any time. A step mostly holds less: gradients are allocated
while activations are freed, or in microbatches are added up while fewer of these are left. The plan lists what is live
at the memory peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from textwrap import shorten

from autopar.ir.microbatching import ONCE
from autopar.ir.plan_record import ResidentTensor
from autopar.placement.formulation import Instance
from autopar.placement.memory_bound import HostMemory, Memory, host_memory
from autopar.placement.placed_step import PlacedStep
from autopar.runtime.rehearse.rehearsal import Footprint, rehearse

from .step_program import program_in_microbatches, step_program

# An optimizer that is not fused allocates this many tensors of the parameter's size while it updates a parameter.
# By reading torch's single-tensor updates.
UPDATE_COPIES = 2
# The most operations that the microbatches of a step may have together for its program to be rehearsed while placements
# are sought. Chosen: those of a transformer (580 operations in 16 microbatches) take about a second.
MOST_OPERATIONS = 10_000
# Characters of an error in a warning. Chosen: what was wrong, and where; not all operands.
_LONGEST = 300


@dataclass(frozen=True)
class ExactMemory:
    """``memory`` at its peak, and the ``holdings`` that are live then. ``memory`` is None if the step could not be
    rehearsed."""

    memory: Memory | None
    holdings: tuple[ResidentTensor, ...]
    warnings: tuple[str, ...] = ()


def is_rehearsed(instance: Instance) -> bool:
    """Whether the memory of the steps of an instance is that of their programs. That of steps without gradients, of
    parts of pipelines, and of steps whose microbatches have too many operations is not."""
    graph, repeats = instance.graph, instance.repeats
    is_short = repeats == ONCE or len(graph) * repeats.microbatches <= MOST_OPERATIONS
    return is_short and repeats.stages == 1 and bool(graph.gradients)


def footprint_of(step: PlacedStep) -> Footprint:
    """What the program of the fullest device holds."""
    if step.repeats == ONCE:
        program = step_program(step.graph, step.assignment, step.prices, step.prices.fullest)
        return rehearse(program, step.prices.cluster.backend)
    return rehearse(program_in_microbatches(step), step.prices.cluster.backend)


def exact_memory(step: PlacedStep, holdings: tuple[ResidentTensor, ...]) -> ExactMemory:
    """The memory of a step on the fullest device of its prices. ``holdings`` are all tensors that are ever held."""
    try:
        footprint = footprint_of(step)
    except Exception as error:  # Any operation may lack an implementation for tensors without data.
        warning = f"memory is an upper bound: the step could not be rehearsed ({reason_of(error)})"
        return ExactMemory(None, holdings, (warning,))
    host = host_memory(step)
    return of_step({node.name: node.target for node in step.graph.placeholders("param")}, footprint, holdings, host)


def reason_of(error: Exception) -> str:
    """Why a rehearsal failed, on one line."""
    return shorten(" ".join([f"{type(error).__name__}:", *str(error).split()]), _LONGEST, placeholder=" ...")


def of_step(
    targets: Mapping[str, str], footprint: Footprint, holdings: tuple[ResidentTensor, ...], host: HostMemory
) -> ExactMemory:
    """The memory of a step whose program has this ``footprint``. ``targets``: the path of each parameter's node;
    ``host``: what rests outside of the device."""
    states, update = bytes_of_update(holdings, host)
    if footprint.stored + footprint.accumulated + update > footprint.peak:
        resident = [h for h in holdings if h.kind in ("weight", "gradient", "optimizer")]
        return _balanced(resident, footprint.stored + footprint.accumulated + update + states, host)
    resident = [h for h in holdings if h.kind in ("weight", "optimizer")]
    resident += _alive(targets, footprint, holdings)
    return _balanced(resident, footprint.peak + states, host)


def bytes_of_update(holdings: Iterable[ResidentTensor], host: HostMemory) -> tuple[int, int]:
    """The bytes of all state of the optimizer, and those that it allocates while it updates the largest parameter."""
    states, largest = 0, 0
    for holding in holdings:
        states += holding.bytes if holding.kind == "optimizer" else 0
        largest = max(largest, holding.bytes if holding.kind == "gradient" else 0)
    return states, UPDATE_COPIES * largest + host.visiting


def _alive(
    targets: Mapping[str, str], footprint: Footprint, holdings: tuple[ResidentTensor, ...]
) -> Iterator[ResidentTensor]:
    """The gradients and activations among ``holdings`` that are live at the peak, with their bytes at that time."""
    peak_bytes = dict(footprint.held)
    for holding in holdings:
        name = targets[holding.name] if holding.kind == "gradient" else holding.name
        count = peak_bytes.pop((holding.kind, name), 0)
        if count:
            yield replace(holding, bytes=count)
        elif holding.kind == "input" and footprint.inputs:
            yield holding


def _balanced(holdings: Iterable[ResidentTensor], peak: int, host: HostMemory) -> ExactMemory:
    """The memory at ``peak`` bytes. Bytes that are not part of any holding are temporary."""
    resident = tuple(holdings)
    parts = {kind: sum(h.bytes for h in resident if h.kind == kind) for kind in {h.kind for h in resident}}
    temporary = max(peak - sum(parts.values()), 0)
    memory = Memory(
        weights=parts.get("weight", 0),
        gradients=parts.get("gradient", 0),
        optimizer=parts.get("optimizer", 0),
        activations=parts.get("activation", 0),
        temporary=temporary,
        inputs=parts.get("input", 0),
        host=host.bytes,
        nvme=host.nvme,
    )
    return ExactMemory(memory, resident)
