"""What one microbatch costs on one device, section by section of the model.

Sections are what comes before the layers, every kept layer (:mod:`.depth`) and what comes after them. Each is billed
from the placed graph: kernels by the roofline of their local shapes, collectives at their links, the bytes that forward
keeps, and what it takes to compute again what recomputation did not keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial

from autopar.cost import compute_seconds, family_of

from .assignment import Use, uses
from .axis_names import weight_values
from .cluster import Cluster
from .depth import Depth
from .graph import REST, VIEWS, Graph, Node, TensorType, Value
from .kernels import Kernels, find_kernels, is_heavy, origin
from .layout import Layout, matches
from .layout_exchange import Block
from .layout_experts import BACKWARD, OPERATIONS, bill_block, check_degree, expert_weights, find_blocks
from .layout_exposed import beside, waited
from .layout_homes import AFTER, BEFORE, homes_of
from .layout_kernels import KernelPrices, graphed, local_size
from .layout_place import Placed
from .layout_remade import remakeable
from .prices import local_bytes, local_type
from .spec import Placements


@dataclass(frozen=True)
class Seconds:
    """Computing, communicating, and waiting for the host, which starts operations one by one."""

    compute: float = 0.0
    communicate: float = 0.0
    host: float = 0.0

    def __sub__(self, other: Seconds) -> Seconds:
        return self + Seconds(-other.compute, -other.communicate, -other.host)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.communicate + other.communicate, self.host + other.host)

    @property
    def total(self) -> float:
        return self.compute + self.communicate + self.host


@dataclass(frozen=True)
class Weight:
    """A trained parameter on one device of the mesh (context, tensor): its elements there and its dtype's bytes;
    ``partial`` axes are those over which its gradient is left as a sum to be taken. ``experts``: of a weight that has
    an entry of every expert, among how many ranks these are divided; 0 for any other."""

    path: str
    elements: int
    itemsize: int
    partial: tuple[int, ...]
    experts: int = 0


@dataclass(frozen=True)
class Section:
    """One section for one microbatch. ``inside`` is what of forward selective recomputation runs again; ``saved`` the
    bytes kept for backward, ``saved_inside`` those of them that selective recomputation does not keep, ``entry`` those
    of what comes in from the section before; ``working`` the most that one kernel makes. ``flops``: of products, all
    devices together. ``blocks`` of experts are not in these until :func:`with_experts` puts them there, and the bytes
    that one device hands to each of their exchanges into ``exchanged``. ``kept``: seconds of forward that are not spent
    again where all but attention and every other product is, which takes ``saved_kept`` bytes. ``saved_remade``: of
    ``saved`` what elementwise operations make again in ``remade`` seconds."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()
    inside: Seconds = Seconds()
    saved: int = 0
    saved_inside: int = 0
    entry: int = 0
    working: int = 0
    flops: float = 0.0
    weights: tuple[Weight, ...] = ()
    is_layer: bool = False
    blocks: tuple[Block, ...] = ()
    exchanged: tuple[float, ...] = ()
    kept: Seconds = Seconds()
    saved_kept: int = 0
    remade: Seconds = Seconds()
    saved_remade: int = 0


@dataclass(frozen=True)
class Sections:
    """All sections: ``layers`` in order, each with the number of layers it stands for."""

    before: Section
    layers: tuple[Section, ...]
    after: Section
    standing: tuple[int, ...] = field(default=())

    @property
    def every(self) -> tuple[Section, ...]:
        """The sections of the whole model, layers repeated."""
        return (self.before, *(self.layers[i] for i in self.standing), self.after)


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
        working=max(section.working, *(bill.working for bill in bills)),
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
        self.inside = _inside_attention(self.graph, self.kernels, homes)
        self.moves = [use for use in reshards if use.source != use.target]
        self.blocks = find_blocks(self.graph, self.assignment, self.prices.mesh)
        self.expert_weights = expert_weights(self.graph)
        self.priced = KernelPrices(placed, homes, layout, self.kernels)
        moved = {(use.value, use.consumer) for use in self.moves}
        self.remade = remakeable(self.graph, self.kernels.saved, moved)
        self.raw = {o.name: o.value for o in self.graph.outputs if o.kind == "gradient" and o.value is not None}

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
        forward, backward, inside, working = Seconds(), Seconds(), Seconds(), 0
        started = {"forward": 0.0, "backward": 0.0}
        kept, saved_kept, products = Seconds(), 0, 0
        for kernel in self.kernels.kernels:
            if self.homes[kernel.nodes[0].name] != name:
                continue
            seconds = Seconds(self.priced.seconds(kernel), 0.0)
            started[kernel.phase] += self.priced.host_seconds(kernel)
            if kernel.nodes[0].op not in OPERATIONS:
                working = max(working, sum(map(self.priced.local, kernel.writes)))
            if kernel.phase == "backward":
                backward += seconds
            else:
                forward += seconds
                products += self.priced.is_product(kernel)
                if self.priced.is_attention(kernel) or (self.priced.is_product(kernel) and products % 2):
                    kept += seconds
                    saved_kept += sum(map(self.priced.local, kernel.writes))
                if any(node.name in self.inside for node in kernel.nodes):
                    inside += seconds
        moved = {"forward": 0.0, "backward": 0.0}
        for use in self.moves:
            if use.role == "operand" and self.homes[use.consumer] == name:
                moved[use.phase] += self.exposed(use)
        forward += Seconds(0.0, moved["forward"])
        backward += Seconds(0.0, moved["backward"])
        return Section(
            forward + Seconds(0.0, 0.0, max(0.0, started["forward"] - forward.total)),
            backward + Seconds(0.0, 0.0, max(0.0, started["backward"] - backward.total)),
            inside,
            entry=self.entry(name),
            working=working,
            flops=self.flops(name),
            weights=self.weights(name),
            is_layer=name not in (BEFORE, AFTER),
            blocks=tuple(block for node, block in self.blocks.items() if self.homes[node] == name),
            # Of collectives reductions are kept, gathers not.
            kept=kept + Seconds(0.0, forward.communicate / 2),
            saved_kept=saved_kept,
            **self._saved(name),
        )

    def _saved(self, name: str) -> dict[str, Any]:
        """Of the values that a section keeps for backward the bytes, by what recomputation would drop."""
        saved = [value for value in self.kernels.saved if self.homes[value.node] == name]
        inside = [value for value in saved if self._stays_inside(value)]
        remade = [value for value in saved if value in self.remade and value not in inside]
        return {
            "saved": sum(map(self.priced.local, saved)),
            "saved_inside": sum(map(self.priced.local, inside)),
            "saved_remade": sum(map(self.priced.local, remade)),
            "remade": Seconds(sum(map(self._remaking, remade))),
        }

    def _remaking(self, value: Value) -> float:
        """Seconds of making a value again from what is kept."""
        moved = sum(map(self.priced.local, (value, *self.remade[value])))
        return compute_seconds(self.prices.cluster, 0.0, moved, torch.float32)

    def _stays_inside(self, value: Value) -> bool:
        """Whether forward uses a value inside attention only: it is remade from what goes in."""
        users = (user for user in self._users(value) if user.phase == "forward")
        return value.node in self.inside and all(user.name in self.inside for user in users)

    def _users(self, value: Value) -> Iterator[Node]:
        """Operations that use a value, views looked through."""
        for user, _ in self.graph.users.get(value, ()):
            if user.op in VIEWS or user.op == REST:
                yield from self._users(Value(user.name))
            else:
                yield user

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
        found = {
            origin(self.graph, value): local_bytes(
                self.graph.type_of(value), self.assignment.strategies[node.name].inputs[i], self.prices.mesh
            )
            for node in self.graph.nodes
            if node.phase == "forward" and not node.is_placeholder and self.homes[node.name] == name
            for i, value in enumerate(node.operands)
        }
        outside = {v: size for v, size in found.items() if self._comes_in(v, name)}
        return sum(outside.values())

    def _comes_in(self, value: Value, name: str) -> bool:
        return value.node in self.varying and self.homes[value.node] != name

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
        return tuple(
            self._weight(node)
            for node in self.graph.placeholders("param")
            if self.homes[node.name] == name and node.target in self.raw
        )

    def _weight(self, node: Node) -> Weight:
        place = self.assignment.parameters[node.name].weight
        kind: TensorType = local_type(node.type, place, self.prices.mesh)
        raw: Placements = self.assignment.placements_of(self.raw[node.target])
        partial = tuple(axis for axis, one in enumerate(raw) if isinstance(one, Partial))
        is_expert = node.name in self.expert_weights
        return Weight(node.target, int(kind.numel), node.type.dtype.itemsize, partial, int(is_expert))


def _inside_attention(graph: Graph, kernels: Kernels, homes: Mapping[str, str]) -> frozenset[str]:
    """Forward nodes from a product of two activations up to the next one that takes its result, elementwise operations
    and reductions between: the inside of attention written out."""
    derived = weight_values(graph)
    products = {
        node.name
        for node in graph.nodes
        if node.phase == "forward"
        and is_heavy(node)
        and family_of(node.op).matrix is not None
        and not any(value.node in derived for value in node.operands)
    }
    after: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.phase != "forward" or node.is_placeholder:
            continue
        if node.name in products:
            after[node.name] = {node.name}
        elif not is_heavy(node):
            after[node.name] = set().union(*(after.get(v.node, set()) for v in node.operands))
    found: set[str] = set()
    for node in graph.nodes:
        if node.name in products:
            for value in node.operands:
                if after.get(value.node):
                    found |= {node.name, *_way_back(graph, value.node, products)}
    return frozenset(found)


def _way_back(graph: Graph, name: str, products: set[str]) -> set[str]:
    """Nodes from ``name`` back to the products it comes from."""
    found, open_now = set[str](), [name]
    while open_now:
        node = graph[open_now.pop()]
        if node.name in found or node.is_placeholder or (is_heavy(node) and node.name not in products):
            continue
        found.add(node.name)
        if node.name not in products:
            open_now += [value.node for value in node.operands]
    return found


def _varying(graph: Graph) -> frozenset[str]:
    """Nodes that depend on weights or inputs: all else, such as a mask, is made where it is needed."""
    found: set[str] = set()
    for node in graph.nodes:
        if not node.is_placeholder:
            taken = (graph[value.node] for value in node.operands)
            if any(one.op in ("param", "input") or one.name in found for one in taken):
                found.add(node.name)
    return frozenset(found)
