"""Lowers one chunk of a pipeline to the program of one rank (:mod:`autopar.chunk`).

As :mod:`.lower` does it, but gradients leave backward as it made them, to be added up over microbatches, until the last
microbatch, in which they are reduced (:mod:`.reducing`); values for other stages leave by the placements of the wire;
and backward comes in two sections: what other stages wait for, and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.chunk import ChunkProgram, Port
from autopar.errors import GraphError
from autopar.graph import Output, Value
from autopar.program import Section, TensorSlot
from autopar.schedule import Schedule
from autopar.spec import Placements, short
from autopar.stages import Edge

from .adding import adding
from .emit import Emitter
from .lower import (
    Lowering,
    NodeLowerer,
    gradient_place,
    refresh_section,
    saved_values,
    stored_slot,
    without_aliases,
)
from .overlap import overlap_section
from .reducing import reducing
from .split_section import split_section

# How each edge's value lies while it travels, on the mesh inside a stage.
Wires = Mapping[Edge, Placements]


@dataclass(frozen=True)
class ChunkLowering:
    """What to lower: ``job`` for the graph of chunk ``chunk``, rests inserted; ``wires`` of all edges of the pipeline;
    ``schedule`` that runs it."""

    job: Lowering
    chunk: int
    wires: Wires
    schedule: Schedule

    def ports(self, *, sends: bool, backward: bool) -> tuple[Port, ...]:
        """The ends of edges at this chunk, in the order of the message."""
        phase = "backward" if backward else "forward"
        mine = [e for e in self.wires if e.phase == phase and self.chunk == (e.source if sends else e.target)]
        return tuple(Port(edge, self._slot(edge)) for edge in sorted(mine))

    def _slot(self, edge: Edge) -> TensorSlot:
        value = self.value(edge)
        kind = self.job.graph.type_of(value)
        if edge.target == self.chunk and self.job.home(value) != self.wires[edge]:
            raise GraphError(
                f"chunk {self.chunk} takes %{edge.name} as {short(self.job.home(value))}, but it travels as "
                f"{short(self.wires[edge])}"
            )
        shape = tuple(int(size) for size in kind.shape)
        return TensorSlot(value.node, "receive", edge.name, shape, self.wires[edge], kind.dtype)

    def value(self, edge: Edge) -> Value:
        """The value of an edge in this chunk's graph."""
        graph = self.job.graph
        if edge.source == self.chunk:
            return next(o.value for o in graph.outputs if o.kind == "send" and o.name == edge.name and o.value)
        return next(Value(node.name) for node in graph.placeholders("receive") if node.target == edge.name)


def lower_chunk(work: ChunkLowering) -> ChunkProgram:
    """The program of one rank for one chunk, overlapped."""
    job, graph = work.job, work.job.graph
    wanted = [output for output in graph.outputs if output.value is not None]
    results = [o for o in wanted if o.kind in ("output", "mutation")]
    gradients = [o for o in wanted if o.kind in ("gradient", "input_gradient")]
    sends, gradient_sends = work.ports(sends=True, backward=False), work.ports(sends=True, backward=True)
    receives, gradient_receives = work.ports(sends=False, backward=False), work.ports(sends=False, backward=True)
    needed = graph.needed_for(output.value for output in wanted if output.value is not None)
    saved = saved_values(graph, needed)
    forward = _forward(work, needed, results, receives, sends, saved)
    backward = _backward(work, needed, saved, gradients, gradient_receives, gradient_sends)
    needs_tangents = bool(gradients or gradient_sends)
    first, second = split_section(backward, len(gradient_sends), "input_gradient", "weight_gradient")
    backward, first, second = map(overlap_section, (backward, first, second))
    more_backward, more_second = (adding(section, len(gradients)) for section in (backward, second))
    halves = work.schedule.weight_gradients(work.chunk)[-1:] == ("weight_gradient",)
    once, more = (second, more_second) if halves else (backward, more_backward)
    section = once if work.schedule.microbatches == 1 else more
    last, reduce = reducing(job, section, gradients, work.schedule.ends_with(work.chunk))
    raw = tuple(job.output_slot(o, job.home(o.value)) for o in gradients if o.value is not None)
    everywhere = job.assignment.replicated
    return ChunkProgram(
        chunk=work.chunk,
        mesh=job.mesh,
        coordinate=job.coordinate,
        parameters=tuple(stored_slot(job, node) for node in graph.placeholders("param")),
        placeholders=tuple(job.slot(node) for node in graph.nodes if _is_given(node.op)),
        receives=receives,
        results=tuple(job.output_slot(o, everywhere) for o in results),
        sends=sends,
        tangents=tuple(job.slot(node) for node in graph.placeholders("tangent")) if needs_tangents else (),
        gradient_receives=gradient_receives,
        gradient_sends=gradient_sends,
        gradients=tuple(job.output_slot(o, gradient_place(job, o)[1]) for o in gradients),
        raw_gradients=raw,
        refresh=refresh_section(job),
        forward=overlap_section(forward),
        input_gradient=first,
        weight_gradient=second,
        backward=backward,
        more_weight_gradient=more_second,
        more_backward=more_backward,
        last=last,
        reduce=reduce,
        constants=graph.constants,
    )


def _is_given(op: str) -> bool:
    return op in ("param", "buffer", "input", "constant", "random")


def _forward(
    work: ChunkLowering,
    needed: set[str],
    results: list[Output],
    receives: tuple[Port, ...],
    sends: tuple[Port, ...],
    saved: list[Value],
) -> Section:
    """From placeholders and received values to results, sent values and those saved for backward."""
    job = work.job
    lowerer = NodeLowerer(job, "forward", Emitter(job.mesh, job.coordinate))
    inputs = [node.name for node in job.graph.nodes if _is_given(node.op)] + [port.slot.name for port in receives]
    lowerer.emitter.taken.update(inputs)
    lowerer.local.update({Value(name): Value(name) for name in inputs})
    for node in job.graph.nodes:
        if node.name in needed and node.phase == "forward" and not node.is_placeholder:
            lowerer.lower(node)
    outputs = [lowerer.give(o.value, job.assignment.replicated) for o in results if o.value is not None]
    outputs += [lowerer.take(work.value(port.edge), port.slot.placements) for port in sends]
    outputs += [lowerer.local[value] for value in saved]
    return lowerer.emitter.section("forward", tuple(inputs), tuple(outputs))


def _backward(
    work: ChunkLowering,
    needed: set[str],
    saved: list[Value],
    gradients: list[Output],
    receives: tuple[Port, ...],
    sends: tuple[Port, ...],
) -> Section:
    """All of backward: from saved values, tangents and received gradients to sent gradients and raw ones."""
    job = work.job
    lowerer = NodeLowerer(job, "backward", Emitter(job.mesh, job.coordinate))
    tangents = [Value(node.name) for node in job.graph.placeholders("tangent")] if gradients or sends else []
    given = [*saved, *tangents, *(Value(port.slot.name) for port in receives)]
    for value in given:
        fresh = lowerer.emitter.fresh(value.node if value.index == 0 else f"{value.node}_{value.index}")
        lowerer.local[value] = Value(fresh)
    inputs = tuple(lowerer.local[value].node for value in given)
    for node in job.graph.nodes:
        if node.name in needed and node.phase == "backward" and not node.is_placeholder:
            lowerer.lower(node)
    sent = [lowerer.take(work.value(port.edge), port.slot.placements) for port in sends]
    raw = [lowerer.local[o.value] for o in gradients if o.value is not None]
    # What is sent may be on its way still when raw gradients are added to it in place.
    outputs = (*sent, *without_aliases(lowerer.emitter, raw, set(inputs), sent))
    return lowerer.emitter.section("backward", inputs, outputs)
