"""Lowers one chunk of a pipeline to the program of one rank (:mod:`autopar.ir.chunk_program`).

As :mod:`.lower`, with three differences. Backward returns unreduced gradients, which are accumulated over microbatches
and reduced in the last one (:mod:`.reduce_last_microbatch`). Values for other stages are resharded to the placements of
the wire. Backward is two sections: the part that other stages wait for, and the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import GraphError
from autopar.ir.chunk_program import ChunkProgram, Port
from autopar.ir.node import Output, Value
from autopar.ir.placements import Placements, short
from autopar.ir.program import Section, TensorSlot
from autopar.ir.stage_meshes import StageMeshes, on_axes
from autopar.ir.staged_graph import Edge
from autopar.schedule.schedule import Schedule

from .accumulate_gradients import adding
from .caches import in_place
from .emit import Emitter
from .lower import (
    Lowering,
    NodeLowerer,
    gradient_place,
    refresh_section,
    saved_values,
    stored_slot,
    with_native_operations,
    without_aliases,
)
from .overlap import overlap_section
from .reduce_last_microbatch import reducing
from .split_section import split_section

# The placements in which each edge's value is sent, as they read on the meshes of both ends
# (:func:`autopar.ir.stage_meshes.on_axes`).
Wires = Mapping[Edge, Placements]


@dataclass(frozen=True)
class ChunkLowering:
    """The input of lowering a chunk: ``job`` for the graph of chunk ``chunk``, with saved activations; ``wires`` of all
    edges of the pipeline; the ``schedule`` that runs it; the ``meshes`` of its stages."""

    job: Lowering
    chunk: int
    wires: Wires
    schedule: Schedule
    meshes: StageMeshes

    def ports(self, *, sends: bool, backward: bool) -> tuple[Port, ...]:
        """The ends of edges at this chunk, in the order of the message."""
        phase = "backward" if backward else "forward"
        mine = [e for e in self.wires if e.phase == phase and self.chunk == (e.source if sends else e.target)]
        return tuple(Port(edge, self._slot(edge), self._elsewhere(edge)) for edge in sorted(mine))

    def _slot(self, edge: Edge) -> TensorSlot:
        value, place = self.value(edge), on_axes(self.wires[edge], self.job.mesh)
        kind = self.job.graph.type_of(value)
        if edge.target == self.chunk and self.job.home(value) != place:
            raise GraphError(
                f"chunk {self.chunk} takes %{edge.name} as {short(self.job.home(value))}, but it is sent as "
                f"{short(place)}"
            )
        shape = tuple(int(size) for size in kind.shape)
        return TensorSlot(value.node, "receive", edge.name, shape, place, kind.dtype)

    def _elsewhere(self, edge: Edge) -> Placements | None:
        """The placements at the other end of an edge, if its mesh is another."""
        other = edge.source if edge.target == self.chunk else edge.target
        mesh = self.meshes.meshes[self.schedule.placement[other]]
        return None if mesh == self.job.mesh else on_axes(self.wires[edge], mesh)

    def value(self, edge: Edge) -> Value:
        """The value of an edge in this chunk's graph."""
        graph = self.job.graph
        if edge.source == self.chunk:
            return next(o.value for o in graph.outputs if o.kind == "send" and o.name == edge.name and o.value)
        return next(Value(node.name) for node in graph.placeholders("receive") if node.target == edge.name)


@dataclass(frozen=True)
class _Crossings:
    """The values that enter and leave a chunk: outputs of its graph, and the ends of edges by direction and phase."""

    results: tuple[Output, ...]
    gradients: tuple[Output, ...]
    sends: tuple[Port, ...]
    receives: tuple[Port, ...]
    gradient_sends: tuple[Port, ...]
    gradient_receives: tuple[Port, ...]

    @staticmethod
    def of(work: ChunkLowering) -> _Crossings:
        wanted = [output for output in work.job.graph.outputs if output.value is not None]
        return _Crossings(
            results=tuple(o for o in wanted if o.kind in ("output", "mutation")),
            gradients=tuple(o for o in wanted if o.kind in ("gradient", "input_gradient")),
            sends=work.ports(sends=True, backward=False),
            receives=work.ports(sends=False, backward=False),
            gradient_sends=work.ports(sends=True, backward=True),
            gradient_receives=work.ports(sends=False, backward=True),
        )

    @property
    def needs_tangents(self) -> bool:
        return bool(self.gradients or self.gradient_sends)


def lower_chunk(work: ChunkLowering) -> ChunkProgram:
    """The program of one rank for one chunk, with communication overlapped."""
    work = replace(work, job=with_native_operations(work.job))
    job, graph, crossings = work.job, work.job.graph, _Crossings.of(work)
    return ChunkProgram(
        chunk=work.chunk,
        mesh=job.mesh,
        coordinate=job.coordinate,
        parameters=tuple(stored_slot(job, node) for node in graph.placeholders("param")),
        placeholders=tuple(job.slot(node) for node in graph.nodes if _is_given(node.op)),
        receives=crossings.receives,
        results=tuple(job.output_slot(o, job.result_place(o)) for o in crossings.results),
        sends=crossings.sends,
        tangents=tuple(job.slot(node) for node in graph.placeholders("tangent")) if crossings.needs_tangents else (),
        gradient_receives=crossings.gradient_receives,
        gradient_sends=crossings.gradient_sends,
        gradients=tuple(job.output_slot(o, gradient_place(job, o)[1]) for o in crossings.gradients),
        constants=graph.constants,
        refresh=refresh_section(job),
        **_sections(work, crossings),
    )


def _sections(work: ChunkLowering, crossings: _Crossings) -> dict[str, Section]:
    """Forward, and backward in every form that a schedule runs: whole and in halves; for the first microbatch, for
    further ones, which add to the sums, and for the last, whose gradients are reduced."""
    graph, count = work.job.graph, len(crossings.gradients)
    needed = graph.needed_for(output.value for output in graph.outputs if output.value is not None)
    saved = saved_values(graph, needed)
    forward, undivided = _forward(work, crossings, needed, saved), _backward(work, crossings, needed, saved)
    halves = split_section(undivided, len(crossings.gradient_sends), "input_gradient", "weight_gradient")
    backward, first, second = map(overlap_section, (undivided, *halves))
    more_backward, more_second = (adding(section, count) for section in (backward, second))
    in_halves = work.schedule.weight_gradients(work.chunk)[-1:] == ("weight_gradient",)
    once, more = (second, more_second) if in_halves else (backward, more_backward)
    ending = once if work.schedule.microbatches == 1 else more
    last, reduce = reducing(work.job, ending, list(crossings.gradients), work.schedule.ends_with(work.chunk))
    return {
        "forward": overlap_section(forward),
        "input_gradient": first,
        "weight_gradient": second,
        "backward": backward,
        "more_weight_gradient": more_second,
        "more_backward": more_backward,
        "last": last,
        "reduce": reduce,
    }


def _is_given(op: str) -> bool:
    return op in ("param", "buffer", "input", "constant", "random", "cache")


def _forward(work: ChunkLowering, crossings: _Crossings, needed: set[str], saved: list[Value]) -> Section:
    """The section from placeholders and received values to results, sent values and values saved for backward."""
    job = work.job
    lowerer = NodeLowerer(job, "forward", Emitter(job.mesh, job.coordinate))
    inputs = [node.name for node in job.graph.nodes if _is_given(node.op)]
    inputs += [port.slot.name for port in crossings.receives]
    lowerer.begin(inputs)
    deque(lowerer.lower_all(needed), 0)
    outputs = [lowerer.give(o.value, job.result_place(o)) for o in crossings.results if o.value is not None]
    outputs += [lowerer.take(work.value(port.edge), port.slot.placements) for port in crossings.sends]
    outputs += [lowerer.saved(value) for value in saved]
    section = lowerer.emitter.section("forward", tuple(inputs), tuple(outputs))
    return in_place(section, [node.name for node in job.graph.caches.values()])


def _backward(work: ChunkLowering, crossings: _Crossings, needed: set[str], saved: list[Value]) -> Section:
    """The section from saved values, tangents and received gradients to sent gradients and unreduced ones."""
    job = work.job
    lowerer = NodeLowerer(job, "backward", Emitter(job.mesh, job.coordinate))
    tangents = [Value(node.name) for node in job.graph.placeholders("tangent")] if crossings.needs_tangents else []
    arguments = [*saved, *tangents, *(Value(port.slot.name) for port in crossings.gradient_receives)]
    inputs = tuple(map(lowerer.receive, arguments))
    values = (work.value(port.edge) for port in crossings.gradient_sends)
    deque(lowerer.lower_all(needed, job.graph.needed_for(values)), 0)
    sent = [lowerer.take(work.value(port.edge), port.slot.placements) for port in crossings.gradient_sends]
    raw = [lowerer.here(o.value) for o in crossings.gradients if o.value is not None]
    # A value may still be in flight when raw gradients that share its memory are accumulated in place.
    outputs = (*sent, *without_aliases(lowerer.emitter, raw, set(inputs), sent))
    return lowerer.emitter.section("backward", inputs, outputs)
