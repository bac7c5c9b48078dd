"""Prices one microbatch on one device, section by section of the model.

Sections are the part before the layers, every traced layer (:mod:`.shortened_model`) and the part after them. Each is
priced from the placed graph: operations as parts of their kernels and collectives by their links, both as in plans, the
bytes that forward saves, and the cost of recomputing values that were not saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch.distributed.tensor import Partial

from autopar.cost import family_of
from autopar.cost.kernels.grouping import find_kernels
from autopar.cost.kernels.kernel import Kernels
from autopar.cost.overlap import taken_by_messages, waited
from autopar.ir.assignment import Use, uses
from autopar.ir.node import Node, TensorType, Value
from autopar.ir.placements import Placements
from autopar.layout import Layout
from autopar.placement.breakdown import broken_kernels
from autopar.placement.prices import local_type
from autopar.planner.roles.expert_blocks import BACKWARD, OPERATIONS
from benchmarks.emulator.stored import gradient_itemsize

from .experts import BlockPrices, check_degree, expert_weights, find_blocks
from .exposed_communication import overlapped_products
from .kernel_seconds import PRODUCTS, KernelPrices, local_size
from .placement import Placed
from .saved_activations import Saved
from .section import Seconds, Section, Sections, Weight
from .section_of_node import AFTER, BEFORE, sections_by_node, using
from .shortened_model import Depth
from .transient_memory import Transients


def with_experts(sections: Sections, prices: BlockPrices) -> Sections:
    """The sections with the costs of their blocks of experts. Raises :class:`OptionsError` if experts do not divide
    evenly."""
    check_degree([block for section in sections.every for block in section.blocks], prices.layout)
    before, *layers, after = (
        _with_experts(section, prices) for section in (sections.before, *sections.layers, sections.after)
    )
    return Sections(before, tuple(layers), after, sections.priced_as)


def _with_experts(section: Section, prices: BlockPrices) -> Section:
    if not section.blocks:
        return section
    costs, layout = list(map(prices.cost, section.blocks)), prices.layout
    weights = (
        replace(w, elements=w.elements // layout.expert, experts=layout.expert) if w.experts else w
        for w in section.weights
    )
    return replace(
        section,
        forward=section.forward + Seconds(sum(cost.forward for cost in costs)),
        backward=section.backward + Seconds(sum(cost.backward for cost in costs)),
        saved=section.saved + sum(cost.saved for cost in costs),
        working=section.working + max(cost.working for cost in costs),
        weights=tuple(weights),
        exchanged=tuple(cost.exchanged for cost in costs if cost.exchanged),
    )


class SectionPricer:
    """Prices sections under a layout; holds the data that they share. ``reads``: the names of what layouts say that
    sections depend on beyond their placements."""

    reads: ClassVar[tuple[str, ...]] = ("precision",)
    kernel_prices: ClassVar[type[KernelPrices]] = KernelPrices
    saved_activations: ClassVar[type[Saved]] = Saved

    def __init__(self, placed: Placed, depth: Depth, layout: Layout) -> None:
        self.placed, self.depth, self.layout = placed, depth, layout
        self.graph, self.prices, self.assignment = placed.graph, placed.prices, placed.assignment
        self.section_of_node = sections_by_node(self.graph, depth.paths)
        reshards = list(uses(self.graph, self.assignment))
        self.kernels = self._find_kernels(reshards)
        self.using = using(self.graph, self.section_of_node)
        self.broken = broken_kernels(self.graph, self.assignment, self.prices.fused)
        self.moves = [use for use in reshards if use.source != use.target]
        self.blocks = find_blocks(self.graph, self.assignment, self.prices.mesh)
        self.expert_weights = expert_weights(self.graph)
        self.gradients = tuple(dict.fromkeys(self.graph.gradients.values()))
        self.priced = self.kernel_prices(placed, self.section_of_node, layout, self.kernels)
        moved = {(use.value, use.consumer) for use in self.moves}
        self.saved = self.saved_activations(self.priced, moved)
        read = self.saved.read
        self.transients = Transients(self.graph, self.assignment, self.priced.local, read, self.kernels.kernels)

    def _find_kernels(self, reshards: Sequence[Use]) -> Kernels:
        placed = {(use.value, use.consumer): use.source != use.target for use in reshards}

        def moves(producer: Node, consumer: Node) -> bool:
            if self.section_of_node[producer.name] != self.section_of_node[consumer.name]:
                return True
            return any(placed.get((v, consumer.name), False) for v in consumer.operands if v.node == producer.name)

        return find_kernels(self.graph, moves, self.runs_alone, partial(local_size, self.placed))

    def runs_alone(self, node: Node) -> bool:
        """Whether an elementwise operation is no part of a kernel of several."""
        return False

    def every(self) -> Sections:
        """All sections, without the costs of blocks of experts."""
        layers = tuple(map(self.section, self.depth.paths))
        return Sections(self.section(BEFORE), layers, self.section(AFTER), self.depth.priced_as)

    def section(self, name: str) -> Section:
        """The costs of one section."""
        kernels = [kernel for kernel in self.kernels.kernels if self.section_of_node[kernel.nodes[0].name] == name]
        forward_kernels = [kernel for kernel in kernels if kernel.phase == "forward"]
        backward_kernels = [kernel for kernel in kernels if kernel.phase == "backward"]
        first, second = (self.operations(name, phase) for phase in ("forward", "backward"))
        saved = [value for value in self.kernels.saved if self.section_of_node[value.node] == name]
        return Section(
            Seconds(self.computing(first), self.communicating(name, "forward")),
            Seconds(self.computing(second), self.communicating(name, "backward")),
            Seconds(self.computing(node for node in first if node.name in self.saved.inside)),
            entry=self.saved.entry(name),
            working=self.transients.working(forward_kernels, backward_kernels, saved),
            flops=self.flops(name),
            weights=self.weights(name),
            is_layer=name not in (BEFORE, AFTER),
            blocks=tuple(block for node, block in self.blocks.items() if self.section_of_node[node] == name),
            accumulating=sum(self._accumulating(v) for v in self.gradients if self.section_of_node[v.node] == name),
            **self.saved.of(name),
        )

    def operations(self, name: str, phase: str) -> list[Node]:
        """The operations of a section in a phase."""
        here = (node for node in self.graph.nodes if self.section_of_node[node.name] == name)
        return [node for node in here if node.phase == phase]

    def computing(self, operations: Iterable[Node]) -> float:
        """Seconds of operations, one after the other."""
        return sum(map(self.priced.seconds, operations), 0.0)

    def communicating(self, name: str, phase: str) -> float:
        """Exposed seconds of a section's collectives in a phase."""
        moves = (use for use in self.moves if use.role == "operand" and self.section_of_node[use.consumer] == name)
        return sum((self.exposed(use) for use in moves if use.phase == phase), 0.0)

    def _accumulating(self, gradient: Value) -> float:
        """Seconds in which a gradient is added to the sum of earlier ones: by the product that computes it, or by an
        operation of its own. Those of experts are priced separately."""
        node, size = self.graph[gradient.node], self.priced.local(gradient)
        if node.op in OPERATIONS:
            return 0.0
        itemsize = self.graph.type_of(gradient).dtype.itemsize
        both = 2 * size // itemsize * gradient_itemsize(self.layout, itemsize)
        if self.adds_up(node):
            return self.priced.accumulating_seconds(node, both - size)
        return (size + both) / self.prices.cluster.device.memory_bandwidth

    def adds_up(self, node: Node) -> bool:
        """Whether an operation adds the gradient that it computes to the sum of earlier ones."""
        return node.op in PRODUCTS

    def exposed(self, use: Use) -> float:
        """The exposed seconds of a reshard, and those that it adds if it breaks a kernel."""
        return self.waiting(use) + self._breaking(use)

    def waiting(self, use: Use) -> float:
        """The exposed seconds of a reshard: in backward those for which no product of as many FLOPs computes."""
        if use.phase == "forward":
            return self.resharding(use)
        products = overlapped_products(self.graph, use.value, use.source, use.target, self._readers_alike(use))
        return waited(self.computing(products), self.resharding(use), taken_by_messages(self.prices.cluster))

    def resharding(self, use: Use) -> float:
        """Seconds of a reshard."""
        return self.prices.table(use.kind).cost(use.source, use.target)

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
                # Training libraries do not compute the first product again.
                taken, given = (inputs[4].shape[1], inputs[5].shape[2]) if node.op == BACKWARD else (0, 1)
                share = 2 * (taken + given) / (3 * taken + 2 * given)
                flops += share * float(family.flops(node, inputs, node.types))
        return flops

    def weights(self, name: str) -> tuple[Weight, ...]:
        """The parameters that a section uses."""
        params = self.graph.placeholders("param")
        return tuple(self.weight(node, name) for node in params if name in self.using[node.name])

    def weight(self, node: Node, name: str) -> Weight:
        """A parameter, as section ``name`` uses it."""
        place = self.assignment.parameters[node.name].weight
        kind: TensorType = local_type(node.type, place, self.prices.mesh)
        trained = node.target in self.graph.gradients
        raw: Placements = self.assignment.placements_of(self.graph.gradients[node.target]) if trained else ()
        partial = tuple(axis for axis, place in enumerate(raw) if isinstance(place, Partial))
        is_expert, is_shared = node.name in self.expert_weights, len(self.using[node.name]) > 1
        sizes = int(kind.numel), int(node.type.numel), node.type.dtype.itemsize
        return Weight(node.target, *sizes, partial, int(is_expert), trained, is_shared)
