"""Lowers a graph with an assignment to the program of one rank.

Every operation becomes its local form on the rank's shards. Every reshard that the assignment implies becomes the hops
it was priced with, once per (value, phase, target placements). Nothing else communicates, so the collectives of the
program are those of the cost breakdown. Gradient reductions, weight refreshes and gathers of small weights are
coalesced into buckets, since many small collectives pay their latency many times.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from autopar.ir.assignment import Assignment, overlaps_backward
from autopar.ir.graph import Graph
from autopar.ir.node import CAST, SAVED_ACTIVATION, VIEWS, Arg, Node, Output, Phase, TensorType, Value, map_arg
from autopar.ir.placements import Placements, Strategy
from autopar.ir.program import Program, Section, TensorSlot
from autopar.ir.reshard import Hop, Sent, make_hop
from autopar.ir.weight_messages import WeightMessages
from autopar.ops.masked import layout_for
from autopar.passes.native.restore import restore
from autopar.passes.rule_language.compose import op_call
from autopar.passes.rule_language.registry import LocalCall, LocalContext, Operand, local_call

from .caches import in_place
from .emit import Buckets, Emitter
from .fuse_bias import FUSED, biased_products
from .weight_gathers import Messages, gathered_together

Path = Callable[[TensorType, Placements, Placements, Sent], tuple[Hop, ...]]
# A tensor to host memory, and from there; and a stored weight that rests there.
STORE, FETCH, REST = "host.store", "host.fetch", "host.rest"
CONTIGUOUS = (("memory_format", torch.contiguous_format),)
# Instructions whose result may share the memory of their operand.
ALIASING = VIEWS | {"aten.slice.Tensor", "aten.select.int", "collective.slice", "collective.partial"}


@dataclass(frozen=True)
class Lowering:
    """The input of lowering: ``assignment`` of ``graph`` (with saved activations and concrete sizes) for the rank at
    ``coordinate``.

    ``path(type, source, target, sent)`` returns the hops a reshard was priced with; ``sent``: see
    :mod:`autopar.ir.reshard`. Gradients and refreshed weights are sent in buckets of about ``bucket_bytes``,
    small weights that a phase gathers in ``messages``. Nodes without an entry in the assignment (outputs that were not
    planned for) run replicated.
    """

    graph: Graph
    assignment: Assignment
    coordinate: tuple[int, ...]
    path: Path
    bucket_bytes: int
    messages: WeightMessages = field(default_factory=WeightMessages)

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.assignment.mesh

    def strategy(self, node: Node) -> Strategy:
        strategy = self.assignment.strategies.get(node.name)
        if strategy is not None:
            return strategy
        everywhere = self.assignment.replicated
        return Strategy((everywhere,) * len(node.operands), (everywhere,) * len(node.types))

    def home(self, value: Value) -> Placements:
        """The placements of a value where it is produced."""
        place = self.assignment.parameters.get(value.node)
        if place is not None:
            return place.weight
        strategy = self.assignment.strategies.get(value.node) or self.strategy(self.graph[value.node])
        return strategy.outputs[value.index]

    def moved(self, value: Value, target: Placements, phase: Phase) -> tuple[Hop, ...]:
        """The hops that take a value from home to ``target`` in ``phase``."""
        sent: Sent = phase if value.node in self.assignment.parameters else "alone"
        return self.path(self.graph.type_of(value), self.home(value), target, sent)

    def result_place(self, output: Output) -> Placements:
        """The placements of a result of the model."""
        return self.assignment.place_of_result(self.graph, output)

    @cached_property
    def biased(self) -> Mapping[str, str]:
        """The sums that are fused with a product, with the names of the products."""
        return biased_products(self.graph, self.strategy)

    @cached_property
    def factored(self) -> frozenset[str]:
        """The products that are fused with a sum."""
        return frozenset(self.biased.values())

    def slot(self, node: Node, placements: Placements | None = None) -> TensorSlot:
        shape = tuple(int(size) for size in node.type.shape)
        place = placements or self.home(Value(node.name))
        return TensorSlot(node.name, node.op, node.target, shape, place, node.type.dtype)

    def output_slot(self, output: Output, placements: Placements) -> TensorSlot:
        assert output.value is not None
        kind = self.graph.type_of(output.value)
        shape = tuple(int(size) for size in kind.shape)
        return TensorSlot(output.name, output.kind, output.name, shape, placements, kind.dtype)


@dataclass
class NodeLowerer:
    """Lowers the nodes of one phase to one section. ``local``: the local value of each value so far; ``moved``: of each
    resharded value; ``factors``: the operands of products that are fused with a later sum; ``away``: the copies in host
    memory of saved activations and weights; ``messages``: the weights that are gathered together."""

    job: Lowering
    phase: Phase
    emitter: Emitter
    local: dict[Value, Value] = field(default_factory=dict)
    moved: dict[tuple[Value, Placements], Value] = field(default_factory=dict)
    factors: dict[str, tuple[Arg, ...]] = field(default_factory=dict)
    away: dict[Value, Value] = field(default_factory=dict)
    messages: Messages = field(default_factory=dict)
    _calls: dict[tuple[object, ...], LocalCall] = field(default_factory=dict)

    def here(self, value: Value) -> Value:
        """The local value of ``value``; reads one that rests in host memory at its first use in this phase."""
        if value not in self.local:
            started = self.emitter.emit(f"{self.away[value].node}_fetch", FETCH, (self.away[value],))
            self.local[value] = self.emitter.emit(f"{started.node}_wait", "collective.wait", (started,))
        return self.local[value]

    def begin(self, inputs: Sequence[str]) -> None:
        """Names the inputs of forward, of which weights may rest in host memory."""
        self.emitter.taken.update(inputs)
        for name in inputs:
            (self.away if name in self.job.assignment.offloaded else self.local)[Value(name)] = Value(name)

    def receive(self, value: Value) -> str:
        """Names the input of the section that brings a saved ``value``, which may rest in host memory."""
        name = self.emitter.fresh(value.node if value.index == 0 else f"{value.node}_{value.index}")
        (self.away if value.node in self.job.assignment.offloaded else self.local)[value] = Value(name)
        return name

    def saved(self, value: Value) -> Value:
        """What forward hands to backward for a saved ``value``: itself, or its copy in host memory."""
        return self.away.get(value) or self.local[value]

    def take(self, value: Value, target: Placements, module: str = "") -> Value:
        """The local value of ``value`` with placements ``target``; reshards it at its first use in this phase."""
        home = self.job.home(value)
        if home == target:
            return self.here(value)
        if (value, target) in self.moved:
            return self.moved[value, target]
        if together := self.messages.get((value, target)):
            message = Buckets(self.emitter, sys.maxsize, "weights", module=module)
            for each in together:
                message.add((each.value, each.target), self.here(each.value), each.kind, each.path)
            self.moved.update(message.finish())
        else:
            path, kind = self.job.moved(value, target, self.phase), self.job.graph.type_of(value)
            self.moved[value, target] = self.emitter.hops(self.here(value), path, kind, module)
        return self.moved[value, target]

    def lower_all(
        self, needed: Set[str], early: Set[str] = frozenset(), before: Callable[[Node], None] = lambda node: None
    ) -> Iterator[Node]:
        """Lowers the ``needed`` nodes of the phase in order, and yields each. ``early``: those of them that will run in
        a section of their own; ``before`` is called with a node before it is lowered."""
        nodes = [n for n in self.job.graph.nodes if n.name in needed and n.phase == self.phase and not n.is_placeholder]
        self.messages = gathered_together(self.job, nodes, self.phase, early)
        for node in nodes:
            before(node)
            self.lower(node)
            yield node

    def give(self, value: Value, target: Placements) -> Value:
        """:meth:`take` for a result of the model, which may be resharded by a single collective
        (``overlaps_backward``)."""
        home, kind = self.job.home(value), self.job.graph.type_of(value)
        direct = make_hop(kind, home, target, self.job.mesh) if home != target else None
        if direct is None or not overlaps_backward(self.job.graph, value):
            return self.take(value, target)
        return self.emitter.hop(self.here(value), direct, kind)

    def lower(self, node: Node) -> None:
        strategy = self.job.strategy(node)
        operands = [
            self.take(value, place, node.module) for value, place in zip(node.operands, strategy.inputs, strict=True)
        ]
        if node.op == SAVED_ACTIVATION:
            self.local[Value(node.name)] = operands[0]
            is_away = node.name in self.job.assignment.offloaded and node.name in self.job.graph.kept
            if self.phase == "forward" and is_away:
                # Here and not at the end: the device may copy while it goes on computing, and then free the memory.
                self.away[Value(node.name)] = self.emitter.emit(
                    f"{node.name}_away", STORE, (operands[0],), (), 1, node.module
                )
            return
        layout = layout_for(node.op)
        if layout is not None:
            operands = [
                self.emitter.emit(f"{value.node}_dense", layout, (value,), (), 1, node.module) for value in operands
            ]
        op, args, kwargs = self._call(node, strategy, operands)
        if node.name in self.job.factored:
            self.factors[node.name], self.local[Value(node.name)] = args, Value(node.name)
            return
        if product := self.job.biased.get(node.name):
            bias = next(local for value, local in zip(node.operands, operands, strict=True) if value.node != product)
            op, args = FUSED, (bias, *self.factors.pop(product))
        first = self.emitter.emit(node.name, op, args, kwargs, len(node.types), node.module)
        for index in range(len(node.types)):
            self.local[Value(node.name, index)] = Value(first.node, index)

    def _call(self, node: Node, strategy: Strategy, operands: list[Value]) -> LocalCall:
        """The call that this device runs for ``node`` on local operands: found once for nodes that differ only in which
        tensors they take, and are placed by one strategy."""
        kinds = map(self.job.graph.type_of, node.operands)
        key = node.form, id(strategy), *map(id, kinds), *map(id, node.types)  # Of the job, which keeps them.
        if key not in self._calls:
            call = op_call(self.job.graph, node)
            context = LocalContext(call, strategy.inputs, strategy.outputs, self.job.mesh, self.job.coordinate)
            self._calls[key] = local_call(context, strategy.local)
        op, args, kwargs = self._calls[key]

        def leaf(arg: Arg) -> Arg:
            return operands[arg.index] if type(arg) is Operand else arg

        return op, map_arg(args, leaf), tuple([(key, map_arg(arg, leaf)) for key, arg in kwargs]) if kwargs else kwargs


def with_native_operations(job: Lowering) -> Lowering:
    """``job`` with torch's own operations where nothing that they need whole is sharded."""
    graph, assignment = restore(job.graph, job.assignment)
    return replace(job, graph=graph, assignment=assignment)


def lower(job: Lowering, outputs: Iterable[Output]) -> Program:
    """The program of one rank that computes ``outputs`` (those without a value are skipped)."""
    graph = replace(job.graph, outputs=tuple(outputs))
    job = with_native_operations(replace(job, graph=graph))
    graph = job.graph
    wanted = [output for output in graph.outputs if output.value is not None]
    needed = graph.needed_for(output.value for output in wanted if output.value is not None)
    results = [o for o in wanted if o.kind in ("output", "mutation")]
    gradients = [o for o in wanted if o.kind in ("gradient", "input_gradient")]
    forward, saved = _forward(job, needed, results)
    backward = _backward(job, needed, saved, gradients)
    return Program(
        mesh=job.mesh,
        coordinate=job.coordinate,
        parameters=tuple(stored_slot(job, node) for node in graph.placeholders("param")),
        placeholders=tuple(job.slot(node) for node in graph.nodes if node.is_placeholder and node.op != "tangent"),
        results=tuple(job.output_slot(o, job.result_place(o)) for o in results),
        tangents=tuple(job.slot(node) for node in graph.placeholders("tangent")) if gradients else (),
        gradients=tuple(job.output_slot(o, gradient_place(job, o)[1]) for o in gradients),
        refresh=refresh_section(job),
        forward=forward,
        backward=backward,
        constants=graph.constants,
    )


def stored_slot(job: Lowering, node: Node) -> TensorSlot:
    return replace(job.slot(node, job.assignment.parameters[node.name].optimizer), dtype=node.stored.dtype)


def _forward(job: Lowering, needed: set[str], results: list[Output]) -> tuple[Section, list[Value]]:
    """The forward section and the graph values it hands to backward."""
    lowerer = NodeLowerer(job, "forward", Emitter(job.mesh, job.coordinate))
    inputs = [node.name for node in job.graph.nodes if node.is_placeholder and node.op != "tangent"]
    lowerer.begin(inputs)
    deque(lowerer.lower_all(needed), 0)
    saved = saved_values(job.graph, needed)
    outputs = [lowerer.give(o.value, job.result_place(o)) for o in results if o.value is not None]
    outputs += [lowerer.saved(value) for value in saved]
    section = lowerer.emitter.section("forward", tuple(inputs), tuple(outputs))
    return in_place(section, [node.name for node in job.graph.caches.values()]), saved


def saved_values(graph: Graph, needed: set[str]) -> list[Value]:
    """Values of forward (saved activations and placeholders) that needed nodes of backward use, each once."""
    uses = (v for n in graph.nodes if n.name in needed and n.phase == "backward" for v in n.operands)
    return [
        value
        for value in dict.fromkeys(uses)
        if graph[value.node].phase == "forward" and graph[value.node].op != "tangent"
    ]


def gradient_place(job: Lowering, output: Output) -> tuple[Placements, Placements]:
    """The placements to which a gradient is reduced, and those in which it is stored."""
    if output.kind == "input_gradient":
        return job.assignment.replicated, job.assignment.replicated
    place = job.assignment.parameters[job.graph.parameters[output.name].name]
    return place.gradient, place.optimizer


def _backward(job: Lowering, needed: set[str], saved: list[Value], gradients: list[Output]) -> Section:
    lowerer = NodeLowerer(job, "backward", Emitter(job.mesh, job.coordinate))
    emitter = lowerer.emitter
    tangents = [Value(node.name) for node in job.graph.placeholders("tangent")] if gradients else []
    inputs = tuple(lowerer.receive(value) for value in (*saved, *tangents))
    buckets = Buckets(emitter, job.bucket_bytes, "gradients")
    produced_by: dict[str, list[int]] = {}
    for position, output in enumerate(gradients):
        assert output.value is not None
        produced_by.setdefault(output.value.node, []).append(position)

    def make_room(node: Node) -> None:
        for position in produced_by.get(node.name, ()):
            buckets.make_room(position, *gradient_path(job, gradients[position]), node.op == CAST)

    def send(name: str) -> None:
        for position in produced_by.get(name, ()):
            value = gradients[position].value
            assert value is not None
            send_gradient(job, buckets, position, gradients[position], lowerer.here(value))

    for value in (*saved, *tangents):
        send(value.node)
    for node in lowerer.lower_all(needed, before=make_room):
        send(node.name)
    done = buckets.finish()
    outputs = without_aliases(emitter, [done[position] for position in range(len(gradients))], set(inputs))
    return emitter.section("backward", inputs, outputs)


def send_gradient(job: Lowering, buckets: Buckets, position: int, output: Output, value: Value) -> None:
    """Sends a gradient, whose local ``value`` has the placements that backward gives it, to the placements in which it
    is stored: first it is reduced, then sliced to the optimizer's placements."""
    buckets.add(position, value, *gradient_path(job, output))


def gradient_path(job: Lowering, output: Output) -> tuple[TensorType, tuple[Hop, ...]]:
    """The type of a gradient, and the hops from the placements that backward gives it to those in which it is
    stored."""
    assert output.value is not None
    kind = job.graph.type_of(output.value)
    reduced, final = gradient_place(job, output)
    path = job.path(kind, job.home(output.value), reduced, "bucketed")
    return kind, path + (job.path(kind, reduced, final, "bucketed") if final != reduced else ())


def without_aliases(
    emitter: Emitter, values: list[Value], inputs: set[str], others: Iterable[Value] = ()
) -> tuple[Value, ...]:
    """``values`` with copies of those that share memory with an earlier one, with an input, with one of ``others`` or
    (if expanded) with themselves, since gradients are updated in place."""
    root: dict[Value, Value] = {}
    expanded: set[Value] = set()
    for instruction in emitter.instructions:
        operand = instruction.args[0] if instruction.args else None
        if instruction.op in ALIASING and isinstance(operand, Value):
            root[Value(instruction.name)] = root.get(operand, operand)
            if instruction.op == "aten.expand.default" or operand in expanded:
                expanded.add(Value(instruction.name))
    seen = {root.get(value, value) for value in others}
    distinct: list[Value] = []
    for value in values:
        base = root.get(value, value)
        if base in seen or base.node in inputs or value in expanded:
            value = emitter.emit(f"{value.node}_copy", "aten.clone.default", (value,), CONTIGUOUS)
        seen.add(base)
        distinct.append(value)
    return tuple(distinct)


def refresh_section(job: Lowering) -> Section:
    """The section that prepares stored parameters for a step: casts those that are used in another dtype, then gathers
    those whose updated value is sharded further."""
    emitter = Emitter(job.mesh, job.coordinate)
    nodes = job.graph.placeholders("param")
    inputs = tuple(emitter.fresh(node.name) for node in nodes)
    buckets = Buckets(emitter, job.bucket_bytes, "weights")
    for node in nodes:
        place, value = job.assignment.parameters[node.name], Value(node.name)
        if node.stored != node.type:
            value = emitter.emit(f"{node.name}_cast", CAST, (value,), (("dtype", node.type.dtype),))
        path = job.path(node.type, place.optimizer, place.weight, "bucketed") if place.optimizer != place.weight else ()
        buckets.add(node.name, value, node.type, path)
    done = dict(buckets.finish())
    for node in nodes:
        if node.name in job.assignment.offloaded:
            # A working copy goes there; the stored weight is there.
            op = REST if done[node.name].node in inputs else STORE
            done[node.name] = emitter.emit(f"{node.name}_away", op, (done[node.name],))
    return emitter.section("refresh", inputs, tuple(done[node.name] for node in nodes))
