"""Lowers one chunk of a pipeline to the program of one rank (:mod:`autopar.chunk`).

As :mod:`.lower` does it, but gradients leave backward as it made them (they are added up over microbatches and reduced
once a step), values for other stages leave by the placements of the wire, and backward comes in two sections: what
other stages wait for, and the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.chunk import ChunkProgram, Port
from autopar.errors import GraphError
from autopar.graph import Arg, Output, Value, map_arg, values_in
from autopar.program import Instruction, Section, TensorSlot
from autopar.spec import Placements, short
from autopar.stages import Edge

from .adding import adding
from .emit import Buckets, Emitter
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

# How each edge's value lies while it travels, on the mesh inside a stage.
Wires = Mapping[Edge, Placements]


@dataclass(frozen=True)
class ChunkLowering:
    """What to lower: ``job`` for the graph of chunk ``chunk``, rests inserted; ``wires`` of all edges of the
    pipeline."""

    job: Lowering
    chunk: int
    wires: Wires

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
        input_gradient=overlap_section(first),
        weight_gradient=overlap_section(second),
        backward=overlap_section(backward),
        more_weight_gradient=adding(overlap_section(second), len(gradients)),
        more_backward=adding(overlap_section(backward), len(gradients)),
        reduce=_reduce(job, gradients),
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


def _reduce(job: Lowering, gradients: list[Output]) -> Section:
    """From raw gradients to gradients as stored."""
    emitter = Emitter(job.mesh, job.coordinate)
    inputs = tuple(emitter.fresh(f"raw_{position}") for position in range(len(gradients)))
    buckets = Buckets(emitter, job.bucket_bytes, "gradients")
    for position, output in enumerate(gradients):
        assert output.value is not None
        kind = job.graph.type_of(output.value)
        reduced, final = gradient_place(job, output)
        path = job.path(kind, job.home(output.value), reduced, True)
        path += job.path(kind, reduced, final, True) if final != reduced else ()
        buckets.add(position, Value(inputs[position]), kind, path)
    done = buckets.finish()
    return emitter.section("reduce", inputs, tuple(done[position] for position in range(len(gradients))))


def split_section(section: Section, count: int, first: str, second: str) -> tuple[Section, Section]:
    """The section in two, run one after the other: the ``first`` does what the first ``count`` outputs need, and
    returns these and what the ``second``, which returns the other outputs, needs of it."""
    needed = _needed(section.instructions, [v for v in section.outputs[:count] if v is not None])
    early = tuple(i for i in section.instructions if i.name in needed)
    late = tuple(i for i in section.instructions if i.name not in needed)
    own = {i.name for i in late}
    wanted = [value for i in late for value in _operands(i)]
    wanted += [value for value in section.outputs[count:] if value is not None]
    carried = tuple(dict.fromkeys(value for value in wanted if value.node not in own))
    names = _carried_names(carried, {*section.inputs, *(i.name for i in section.instructions)})

    def renamed(value: Value) -> Value:
        return names.get(value, value)

    outputs = tuple(value and renamed(value) for value in section.outputs[count:])
    inputs = tuple(names.get(value, value).node for value in carried)
    return (
        Section(first, section.inputs, early, (*section.outputs[:count], *carried)),
        Section(second, inputs, tuple(_renamed(i, names) for i in late), outputs),
    )


def _carried_names(carried: tuple[Value, ...], taken: set[str]) -> dict[Value, Value]:
    """Inputs of a section are single values: names for second and later results."""
    found: dict[Value, Value] = {}
    for value in carried:
        if value.index:
            name = f"{value.node}_result{value.index}"
            while name in taken:
                name += "_"
            taken.add(name)
            found[value] = Value(name)
    return found


def _renamed(instruction: Instruction, names: Mapping[Value, Value]) -> Instruction:
    def leaf(arg: Arg) -> Arg:
        return names.get(arg, arg) if isinstance(arg, Value) else arg

    kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in instruction.kwargs)
    return replace(instruction, args=map_arg(instruction.args, leaf), kwargs=kwargs)


def _operands(instruction: Instruction) -> Iterable[Value]:
    return values_in((instruction.args, tuple(arg for _, arg in instruction.kwargs)))


def _needed(instructions: tuple[Instruction, ...], values: Iterable[Value]) -> set[str]:
    """Names of the instructions that ``values`` depend on."""
    needed = {value.node for value in values}
    for instruction in reversed(instructions):
        if instruction.name in needed:
            needed.update(value.node for value in _operands(instruction))
    return needed & {i.name for i in instructions}
