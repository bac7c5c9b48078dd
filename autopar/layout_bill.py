"""What one microbatch costs on one device, section by section of the model.

Sections are what comes before the layers, every kept layer (:mod:`.depth`) and what comes after them. Each is billed
from the placed graph: kernels by the roofline of their local shapes, collectives at their links, the bytes that forward
keeps, and what it takes to compute again what recomputation did not keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch.distributed.tensor import Partial

from autopar.cost import compute_seconds, family_of

from .assignment import Use, operand_uses, uses
from .cluster import Cluster
from .depth import Depth
from .graph import Graph, Node, TensorType, Value
from .kernels import Kernel, Kernels, find_kernels, origin, readers
from .layout import Layout, matches
from .layout_attention import inside_attention
from .layout_experts import BACKWARD, are_cast, bill_block, check_degree, expert_weights, find_blocks
from .layout_exposed import beside, waited
from .layout_homes import AFTER, BEFORE, homes_of, using
from .layout_kernels import KernelPrices, graphed, local_size
from .layout_place import Placed
from .layout_remade import computed_again, remakeable
from .layout_section import Seconds, Section, Sections, Weight
from .layout_transients import Transients
from .prices import local_bytes, local_type
from .spec import Placements


def with_experts(sections: Sections, layout: Layout, cluster: Cluster) -> Sections:
    """The sections with their blocks of experts, divided as ``layout`` says. Raises :class:`OptionsError` if experts do
    not come out even."""
    check_degree([block for section in sections.every for block in section.blocks], layout)
    before, *layers, after = (
        _with_experts(section, layout, cluster) for section in (sections.before, *sections.layers, sections.after)
    )
    return Sections(before, tuple(layers), after, sections.standing)


def _with_experts(section: Section, layout: Layout, cluster: Cluster) -> Section:
    if not section.blocks:
        return section
    bills = [bill_block(block, layout, cluster) for block in section.blocks]
    forward, backward = Seconds(), Seconds()
    for block, bill in zip(section.blocks, bills, strict=True):
        each = 0.0 if graphed(block.module, layout) else cluster.device.host_seconds
        forward += Seconds(bill.forward, 0.0, max(0.0, bill.starts[0] * each - bill.forward))
        backward += Seconds(bill.backward, 0.0, max(0.0, bill.starts[1] * each - bill.backward))
    weights = (
        replace(w, elements=w.elements // layout.expert, experts=layout.expert) if w.experts else w
        for w in section.weights
    )
    return replace(
        section,
        forward=section.forward + forward,
        backward=section.backward + backward,
        saved=section.saved + sum(bill.saved for bill in bills),
        working=section.working + max(bill.working for bill in bills),
        weights=tuple(weights),
        exchanged=tuple(bill.exchanged for bill in bills if bill.exchanged),
    )


def bill_sections(placed: Placed, depth: Depth, layout: Layout) -> Sections:
    """The sections of a placed graph of one microbatch, blocks of experts set apart."""
    paths, standing = depth.paths, depth.standing
    biller = _Biller(placed, homes_of(placed.graph, paths), layout)
    layers = tuple(biller.section(path) for path in paths)
    return Sections(biller.section(BEFORE), layers, biller.section(AFTER), standing)


class _Biller:
    """Holds what all sections share while they are billed."""

    def __init__(self, placed: Placed, homes: Mapping[str, str], layout: Layout) -> None:
        self.placed, self.homes, self.layout = placed, homes, layout
        self.graph, self.prices, self.assignment = placed.graph, placed.prices, placed.assignment
        reshards = list(uses(self.graph, self.assignment))
        self.kernels = self._find_kernels(reshards)
        self.varying = _varying(self.graph)
        self.using = using(self.graph, homes)
        self.inside = inside_attention(self.graph)
        self.moves = [use for use in reshards if use.source != use.target]
        self.blocks = find_blocks(self.graph, self.assignment, self.prices.mesh)
        self.expert_weights = expert_weights(self.graph)
        self.priced = KernelPrices(placed, homes, layout, self.kernels)
        self.kept = {value: self.priced.kept(value) for value in self.kernels.saved}
        kept = dict(self.kept)
        self.transients = Transients(self.graph, self.assignment, self.priced.local, kept, self.kernels.kernels)
        self.last = self._after_layers()
        moved = {(use.value, use.consumer) for use in self.moves}
        self.remade = remakeable(self.graph, self.kernels.saved, moved)
        self.again = computed_again(self.graph, self.kernels.saved, self._is_recomputed)
        self.kept.update({value: self.priced.kept(value) for value in self.again.taken if value.node in self.varying})

    def _is_recomputed(self, node: Node) -> bool:
        return matches(node.module, self.layout.recomputed)

    def _find_kernels(self, reshards: Sequence[Use]) -> Kernels:
        placed = {(use.value, use.consumer): use.source != use.target for use in reshards}
        eager = self.layout.eager

        def moves(producer: Node, consumer: Node) -> bool:
            if self.homes[producer.name] != self.homes[consumer.name]:
                return True
            return any(placed.get((v, consumer.name), False) for v in consumer.operands if v.node == producer.name)

        def runs_alone(node: Node) -> bool:
            return matches(node.module, eager)

        return find_kernels(self.graph, moves, runs_alone, partial(local_size, self.placed))

    def section(self, name: str) -> Section:
        """The bill of one section. Of its collectives, half of forward's seconds are taken to be reductions, which
        recomputation keeps, and half gathers, which it repeats."""
        kernels = [kernel for kernel in self.kernels.kernels if self.homes[kernel.nodes[0].name] == name]
        ahead = [kernel for kernel in kernels if kernel.phase == "forward"]
        back = [kernel for kernel in kernels if kernel.phase == "backward"]
        forward, kept = self._seconds(name, "forward", ahead), list(self._kept(ahead))
        saved = [value for value in self.kernels.saved if self.homes[value.node] == name]
        return Section(
            forward,
            self._seconds(name, "backward", back),
            Seconds(self._computing(kernel for kernel in ahead if self._is_inside(kernel))),
            entry=self.entry(name),
            working=self.transients.working(ahead, back, saved),
            flops=self.flops(name),
            weights=self.weights(name),
            is_layer=name not in (BEFORE, AFTER),
            blocks=tuple(block for node, block in self.blocks.items() if self.homes[node] == name),
            kept=Seconds(self._computing(kept), forward.communicate / 2),
            saved_kept=sum(map(self._written, kept)),
            again=self._repeating(name, ahead),
            **self._saved(name),
        )

    def _seconds(self, name: str, phase: str, kernels: Sequence[Kernel]) -> Seconds:
        """Of a phase: its kernels, the collectives it waits for, and the host where starting takes longer than both."""
        moves = (use for use in self.moves if use.role == "operand" and self.homes[use.consumer] == name)
        found = Seconds(self._computing(kernels), sum((self.exposed(use) for use in moves if use.phase == phase), 0.0))
        started = sum(map(self.priced.host_seconds, kernels), 0.0)
        return replace(found, host=max(0.0, started - found.total))

    def _computing(self, kernels: Iterable[Kernel]) -> float:
        return sum(map(self.priced.seconds, kernels), 0.0)

    def _written(self, kernel: Kernel) -> int:
        """Bytes that a kernel writes."""
        return sum(map(self.priced.local, kernel.writes))

    def _is_inside(self, kernel: Kernel) -> bool:
        return any(node.name in self.inside for node in kernel.nodes)

    def _kept(self, forward: Iterable[Kernel]) -> Iterator[Kernel]:
        """What ``recompute="operations"`` does not run again: attention, and every other product with weights."""
        is_kept = cycle((True, False))
        for kernel in forward:
            if self.priced.is_attention(kernel) or (self.priced.is_product(kernel) and next(is_kept)):
                yield kernel

    def _after_layers(self) -> frozenset[str]:
        """The operations of forward that no layer comes after."""
        names = [node.name for node in self.graph.nodes if node.phase == "forward" and not node.is_placeholder]
        end = max((i for i, name in enumerate(names) if self.homes[name] not in (BEFORE, AFTER)), default=-1)
        return frozenset(names[end + 1 :])

    def _repeating(self, name: str, forward: Sequence[Kernel]) -> Seconds:
        """What backward takes once more of the modules that the layout has computed again."""
        kernels = (kernel for kernel in forward if any(node.name in self.again.nodes for node in kernel.nodes))
        moves = (use for use in self.moves if use.role == "operand" and use.phase == "forward")
        repeated = (use for use in moves if use.consumer in self.again.nodes and self.homes[use.consumer] == name)
        return Seconds(self._computing(kernels), sum(map(self.exposed, repeated), 0.0))

    def _saved(self, name: str) -> dict[str, Any]:
        """Of the values that a section keeps for backward the bytes, by what recomputation would drop."""
        here = [value for value in self.kept if self.homes[value.node] == name]
        saved = [value for value in here if value not in self.again.dropped]
        held = self._held_by_callers(name)
        inside = [value for value in saved if self._stays_inside(value)]
        remade = [value for value in saved if value in self.remade and value not in inside]
        return {
            "saved": sum(self.kept[value] for value in saved) + held,
            "saved_last": sum(self.kept[value] for value in saved if value.node in self.last)
            + (held if name == AFTER else 0),
            "saved_inside": sum(self.kept[value] for value in inside),
            "saved_remade": sum(self.kept[value] for value in remade),
            "remade": Seconds(sum(map(self._remaking, remade))),
            "saved_again": sum(self.kept[value] for value in here if value in self.again.dropped),
        }

    def _held_by_callers(self, name: str) -> int:
        """Bytes of what comes into the modules of :attr:`Layout.holds` from others, and of the copies that collectives
        make of it for them, where these are not kept anyway."""
        found: dict[tuple[Value, Placements], int] = {}
        for use in self._operands(name):
            source = origin(self.graph, use.value)
            if not self._is_held(use.consumer) or not self._is_made_elsewhere(source):
                continue
            if use.target != use.source or source not in self.kernels.saved:
                found[source, use.target] = self._taken(use)
        return sum(found.values())

    def _is_made_elsewhere(self, value: Value) -> bool:
        return value.node in self.varying and not self._is_held(value.node)

    def _is_held(self, name: str) -> bool:
        return matches(self.graph[name].module, self.layout.holds)

    def _remaking(self, value: Value) -> float:
        """Seconds of making a value again from what is kept."""
        moved = sum(map(self.priced.local, (value, *self.remade[value])))
        return compute_seconds(self.prices.cluster, 0.0, moved, torch.float32)

    def _stays_inside(self, value: Value) -> bool:
        """Whether forward uses a value inside attention only: it is remade from what goes in."""
        users = (user for user in readers(self.graph, value) if user.phase == "forward")
        return value.node in self.inside and all(user.name in self.inside for user in users)

    def exposed(self, use: Use) -> float:
        """Seconds of a reshard for which devices wait. Where collectives travel in pieces (``"tensor"``), all of them
        do, under the products next to them."""
        seconds = self.prices.table(use.kind).cost(use.source, use.target)
        if use.phase == "forward" or not self.layout.hides_input_gradients:
            return seconds
        products = beside(self.graph, use.value, use.source, use.target, self._takers(use))
        return waited(sum(self.priced.seconds(self.kernels.of[product.name]) for product in products), seconds)

    def _takers(self, use: Use) -> Iterator[Node]:
        """The operations that take a value so, in the same phase."""
        for user, operand in self.graph.users.get(use.value, ()):
            same = user.phase == use.phase and self.homes[user.name] == self.homes[use.consumer]
            if same and self.assignment.strategies[user.name].inputs[operand] == use.target:
                yield user

    def entry(self, name: str) -> int:
        """Bytes of what comes in from the sections before, in forward."""
        taken = {origin(self.graph, use.value): self._taken(use) for use in self._operands(name)}
        return sum(size for value, size in taken.items() if self._comes_in(value, name))

    def _comes_in(self, value: Value, name: str) -> bool:
        return value.node in self.varying and self.homes[value.node] != name

    def _operands(self, name: str) -> Iterator[Use]:
        """What the operations of a section take in forward."""
        for node in self.graph.nodes:
            if node.phase == "forward" and self.homes[node.name] == name:
                yield from operand_uses(self.graph, self.assignment, node)

    def _taken(self, use: Use) -> int:
        """Bytes of a value on one device, as it is taken."""
        return local_bytes(use.kind, use.target, self.prices.mesh)

    def flops(self, name: str) -> float:
        """Of the matrix products of a section, on whole tensors."""
        found = 0.0
        for node in self.graph.nodes:
            family = family_of(node.op)
            if family.matrix is not None and self.homes[node.name] == name:
                inputs = tuple(map(self.graph.type_of, node.operands))
                # The operation computes a third of its backward products again, which training libraries do not.
                share = 2 / 3 if node.op == BACKWARD else 1.0
                found += share * float(family.flops(node, inputs, node.types))
        return found

    def weights(self, name: str) -> tuple[Weight, ...]:
        return tuple(self._weight(node) for node in self.graph.placeholders("param") if name in self.using[node.name])

    def _weight(self, node: Node) -> Weight:
        place = self.assignment.parameters[node.name].weight
        kind: TensorType = local_type(node.type, place, self.prices.mesh)
        trained = node.target in self.graph.gradients
        raw: Placements = self.assignment.placements_of(self.graph.gradients[node.target]) if trained else ()
        partial = tuple(axis for axis, one in enumerate(raw) if isinstance(one, Partial))
        is_expert = node.name in self.expert_weights
        about = partial, int(is_expert), trained, self._is_cast(node, kind), len(self.using[node.name]) > 1
        return Weight(node.target, int(kind.numel), node.type.dtype.itemsize, *about)

    def _is_cast(self, node: Node, local: TensorType) -> bool:
        """Whether products take a parameter in fp8: of what has an entry of every expert the matrices."""
        if node.name not in self.expert_weights:
            return node.name in self.priced.cast_weights
        return self.layout.precision == "fp8" and local.rank == 3 and are_cast(*map(int, local.shape[1:]))


def _varying(graph: Graph) -> frozenset[str]:
    """Nodes that depend on weights or inputs: all else, such as a mask, is made where it is needed."""
    found: set[str] = set()
    for node in graph.nodes:
        if not node.is_placeholder:
            taken = (graph[value.node] for value in node.operands)
            if any(one.op in ("param", "input") or one.name in found for one in taken):
                found.add(node.name)
    return frozenset(found)
