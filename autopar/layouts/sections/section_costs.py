"""Prices one microbatch on one device, section by section of the model.

Sections are the part before the layers, every traced layer (:mod:`.shortened_model`) and the part after them. Each is
priced from the placed graph: operations as parts of their kernels and collectives by their links, both as in plans, the
bytes that forward saves, and the cost of recomputing values that were not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

from torch.distributed.tensor import Partial

from autopar.cluster.description import Cluster
from autopar.cost import family_of
from autopar.cost.kernels.grouping import find_kernels
from autopar.cost.kernels.kernel import Kernels, readers
from autopar.cost.overlap import taken_by_messages, waited
from autopar.ir.assignment import Use, uses
from autopar.ir.node import Node, TensorType, Value
from autopar.ir.placements import Placements
from autopar.layout import Layout, matches
from autopar.placement.breakdown import broken_kernels
from autopar.placement.prices import local_type

from .experts import BACKWARD, OPERATIONS, are_cast, check_degree, expert_weights, find_blocks, price_block
from .exposed_communication import overlapped_products
from .kernel_seconds import PRODUCTS, KernelPrices, launches_as_graph, local_size
from .placement import Placed
from .saved_activations import Saved
from .section import Seconds, Section, Sections, Weight
from .section_of_node import AFTER, BEFORE, sections_by_node, using
from .shortened_model import Depth
from .transient_memory import Transients


def with_experts(sections: Sections, layout: Layout, cluster: Cluster) -> Sections:
    """The sections with the costs of their blocks of experts, divided as ``layout`` says. Raises :class:`OptionsError`
    if experts do not divide evenly."""
    check_degree([block for section in sections.every for block in section.blocks], layout)
    before, *layers, after = (
        _with_experts(section, layout, cluster) for section in (sections.before, *sections.layers, sections.after)
    )
    return Sections(before, tuple(layers), after, sections.priced_as)


def _with_experts(section: Section, layout: Layout, cluster: Cluster) -> Section:
    if not section.blocks:
        return section
    costs = [price_block(block, layout, cluster) for block in section.blocks]
    forward, backward = Seconds(), Seconds()
    for block, cost in zip(section.blocks, costs, strict=True):
        each = 0.0 if launches_as_graph(block.module, layout) else cluster.device.host_seconds
        forward += Seconds(cost.forward, 0.0, max(0.0, cost.starts[0] * each - cost.forward))
        backward += Seconds(cost.backward, 0.0, max(0.0, cost.starts[1] * each - cost.backward))
    weights = (
        replace(w, elements=w.elements // layout.expert, experts=layout.expert) if w.experts else w
        for w in section.weights
    )
    return replace(
        section,
        forward=section.forward + forward,
        backward=section.backward + backward,
        saved=section.saved + sum(cost.saved for cost in costs),
        working=section.working + max(cost.working for cost in costs),
        weights=tuple(weights),
        exchanged=tuple(cost.exchanged for cost in costs if cost.exchanged),
    )


def section_costs(placed: Placed, depth: Depth, layout: Layout) -> Sections:
    """The sections of a placed graph of one microbatch, without the costs of blocks of experts."""
    paths, priced_as = depth.paths, depth.priced_as
    pricer = _SectionPricer(placed, sections_by_node(placed.graph, paths), layout)
    layers = tuple(pricer.section(path) for path in paths)
    return Sections(pricer.section(BEFORE), layers, pricer.section(AFTER), priced_as)


class _SectionPricer:
    """Prices sections; holds the data that they share."""

    def __init__(self, placed: Placed, section_of_node: Mapping[str, str], layout: Layout) -> None:
        self.placed, self.section_of_node, self.layout = placed, section_of_node, layout
        self.graph, self.prices, self.assignment = placed.graph, placed.prices, placed.assignment
        reshards = list(uses(self.graph, self.assignment))
        self.kernels = self._find_kernels(reshards)
        self.using = using(self.graph, section_of_node)
        self.broken = broken_kernels(self.graph, self.assignment, self.prices.fused)
        self.moves = [use for use in reshards if use.source != use.target]
        self.blocks = find_blocks(self.graph, self.assignment, self.prices.mesh)
        self.expert_weights = expert_weights(self.graph)
        self.gradients = tuple(dict.fromkeys(self.graph.gradients.values()))
        self.priced = KernelPrices(placed, section_of_node, layout, self.kernels)
        moved = {(use.value, use.consumer) for use in self.moves}
        self.saved = Saved(placed, section_of_node, layout, self.priced, moved)
        read = self.saved.read
        self.transients = Transients(self.graph, self.assignment, self.priced.local, read, self.kernels.kernels)

    def _find_kernels(self, reshards: Sequence[Use]) -> Kernels:
        placed = {(use.value, use.consumer): use.source != use.target for use in reshards}
        eager = self.layout.eager

        def moves(producer: Node, consumer: Node) -> bool:
            if self.section_of_node[producer.name] != self.section_of_node[consumer.name]:
                return True
            return any(placed.get((v, consumer.name), False) for v in consumer.operands if v.node == producer.name)

        def runs_alone(node: Node) -> bool:
            return matches(node.module, eager)

        return find_kernels(self.graph, moves, runs_alone, partial(local_size, self.placed))

    def section(self, name: str) -> Section:
        """The costs of one section. Half of the seconds of forward's collectives are assumed to be reductions, whose
        results recomputation saves, and half gathers, which it repeats."""
        kernels = [kernel for kernel in self.kernels.kernels if self.section_of_node[kernel.nodes[0].name] == name]
        forward_kernels = [kernel for kernel in kernels if kernel.phase == "forward"]
        backward_kernels = [kernel for kernel in kernels if kernel.phase == "backward"]
        operations = [node for node in self.graph.nodes if self.section_of_node[node.name] == name]
        first = [node for node in operations if node.phase == "forward"]
        forward, kept = self._seconds(name, "forward", first), list(self._kept(first))
        saved = [value for value in self.kernels.saved if self.section_of_node[value.node] == name]
        return Section(
            forward,
            self._seconds(name, "backward", [node for node in operations if node.phase == "backward"]),
            Seconds(self._computing(node for node in first if node.name in self.saved.inside)),
            entry=self.saved.entry(name),
            working=self.transients.working(forward_kernels, backward_kernels, saved),
            flops=self.flops(name),
            weights=self.weights(name),
            is_layer=name not in (BEFORE, AFTER),
            blocks=tuple(block for node, block in self.blocks.items() if self.section_of_node[node] == name),
            kept=Seconds(self._computing(kept), forward.communicate / 2),
            saved_kept=sum(self.priced.local(Value(node.name)) for node in kept),
            again=self._repeating(name, first),
            accumulating=sum(self._accumulating(v) for v in self.gradients if self.section_of_node[v.node] == name),
            **self.saved.of(name),
        )

    def _seconds(self, name: str, phase: str, operations: Sequence[Node]) -> Seconds:
        """Seconds of a phase: operations, exposed collectives, and waiting for the host if launches take longer than
        both."""
        moves = (use for use in self.moves if use.role == "operand" and self.section_of_node[use.consumer] == name)
        exposed = sum((self.exposed(use) for use in moves if use.phase == phase), 0.0)
        seconds = Seconds(self._computing(operations), exposed)
        launches = sum(map(self.priced.host_seconds, operations), 0.0)
        return replace(seconds, host=max(0.0, launches - seconds.total))

    def _computing(self, operations: Iterable[Node]) -> float:
        return sum(map(self.priced.seconds, operations), 0.0)

    def _kept(self, forward: Iterable[Node]) -> Iterator[Node]:
        """The operations that ``recompute="operations"`` does not repeat: attention, and every other product with
        weights."""
        is_kept = cycle((True, False))
        for node in forward:
            if self.priced.is_attention(node) or (self.priced.is_product(node) and next(is_kept)):
                yield node

    def _repeating(self, name: str, forward: Sequence[Node]) -> Seconds:
        """The cost of repeating modules that the layout names as recomputed."""
        again = [node for node in forward if node.name in self.saved.again.nodes]
        moves = (use for use in self.moves if use.role == "operand" and use.phase == "forward")
        repeated = (
            use
            for use in moves
            if use.consumer in self.saved.again.nodes and self.section_of_node[use.consumer] == name
        )
        return Seconds(self._computing(again), sum(map(self.exposed, repeated), 0.0))

    def _accumulating(self, gradient: Value) -> float:
        """Seconds in which a gradient is added to the sum of earlier ones: by the product that computes it, or by an
        operation of its own. Those of experts are priced separately."""
        node, size = self.graph[gradient.node], self.priced.local(gradient)
        if node.op in OPERATIONS:
            return 0.0
        itemsize = self.graph.type_of(gradient).dtype.itemsize
        both = 2 * size // itemsize * self.layout.gradient_itemsize(itemsize)
        if self.layout.gradient_accumulation_fusion and node.op in PRODUCTS:
            return self.priced.accumulating_seconds(node, both - size)
        return (size + both) / self.prices.cluster.device.memory_bandwidth

    def exposed(self, use: Use) -> float:
        """The exposed seconds of a reshard, and those that it adds if it breaks a kernel. With ``"tensor"`` in
        ``overlap`` collectives are sent in pieces under the products next to them, which is priced elsewhere."""
        seconds, broken = self.prices.table(use.kind).cost(use.source, use.target), self._breaking(use)
        if use.phase == "forward" or not self.layout.hides_input_gradients:
            return seconds + broken
        products = overlapped_products(self.graph, use.value, use.source, use.target, self._readers_alike(use))
        computing, taken = self._computing(products), taken_by_messages(self.prices.cluster)
        return waited(computing, seconds, taken) + broken

    def _breaking(self, use: Use) -> float:
        """Seconds that a reshard adds inside a kernel."""
        if (use.value, use.phase, use.target) not in self.broken:
            return 0.0
        return self.prices.broken(use.kind, use.source, use.target)

    def _readers_alike(self, use: Use) -> Iterator[Node]:
        """The operations of the same section and phase that read a value with the same placement."""
        for user, operand in self.graph.users.get(use.value, ()):
            same = user.phase == use.phase and self.section_of_node[user.name] == self.section_of_node[use.consumer]
            if same and self.assignment.strategies[user.name].inputs[operand] == use.target:
                yield user

    def flops(self, name: str) -> float:
        """FLOPs of a section's matrix products, summed over all devices."""
        flops = 0.0
        for node in self.graph.nodes:
            family = family_of(node.op)
            if family.matrix is not None and self.section_of_node[node.name] == name:
                inputs = tuple(map(self.graph.type_of, node.operands))
                # A third of the operation's backward products are recomputation, which training libraries do not do.
                share = 2 / 3 if node.op == BACKWARD else 1.0
                flops += share * float(family.flops(node, inputs, node.types))
        return flops

    def weights(self, name: str) -> tuple[Weight, ...]:
        return tuple(
            replace(self._weight(node), again=self._taken_again(node, name))
            for node in self.graph.placeholders("param")
            if name in self.using[node.name]
        )

    def _taken_again(self, node: Node, name: str) -> frozenset[str]:
        """The kinds of recomputation in which a section reads a parameter once more."""
        users = {user.name for user in readers(self.graph, Value(node.name)) if user.phase == "forward"}
        here = {user for user in users if self.section_of_node[user] == name}
        return frozenset(way for way, nodes in self.saved.repeated.items() if here & nodes)

    def _weight(self, node: Node) -> Weight:
        place = self.assignment.parameters[node.name].weight
        kind: TensorType = local_type(node.type, place, self.prices.mesh)
        trained = node.target in self.graph.gradients
        raw: Placements = self.assignment.placements_of(self.graph.gradients[node.target]) if trained else ()
        partial = tuple(axis for axis, place in enumerate(raw) if isinstance(place, Partial))
        is_expert = node.name in self.expert_weights
        is_cast, is_shared = self._is_cast(node, kind), len(self.using[node.name]) > 1
        sizes = int(kind.numel), int(node.type.numel), node.type.dtype.itemsize
        return Weight(node.target, *sizes, partial, int(is_expert), trained, is_cast, is_shared)

    def _is_cast(self, node: Node, local: TensorType) -> bool:
        """Whether products read a parameter in fp8; of parameters with an entry for each expert, the matrices."""
        if node.name not in self.expert_weights:
            return node.name in self.priced.cast_weights
        return self.layout.precision == "fp8" and local.rank == 3 and are_cast(*map(int, local.shape[1:]))
