"""Prices of a compiled step: which operations of a graph share kernels, and what each accounts for.

Kernels are found before anything is placed (:mod:`autopar.cost.kernels.grouping`). They end where another layer begins,
as compiled pieces do (docs/compile.md). A reshard inside a kernel ends the piece, too: the value is written and read,
and what follows is launched by itself (:meth:`autopar.placement.prices.Prices.broken`). That is priced on the tensor
edge, so an objective of the placement program is the sum of the lines of the cost breakdown.

Equal layers have the shares of the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from autopar.cluster.device import Device
from autopar.cost.kernels.grouping import Fusing, find_kernels
from autopar.cost.kernels.kernel import Kernel, Kernels, is_alias, is_lookup, origin, readers
from autopar.cost.kernels.share import FREE, Share, shares_of
from autopar.cost.kernels.sums_apart import share_of_both, with_sums_apart
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.module_paths import layers_among, outermost_layer
from autopar.ir.node import RECOMPUTED, VIEWS, Node, Value
from autopar.ir.placements import REPLICATE, Strategy
from autopar.ops.random_streams import STREAMED
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.lower.fuse_bias import biased_products
from autopar.passes.native.restore import restore
from autopar.torch_internals.operators import OpOverload

# Copies of a node for another chunk of a pipeline, and for backward.
_COPY = re.compile(rf"(_at\d+)?({RECOMPUTED})?$")
# What a compiled piece does not contain, but for look-ups, whose indices are checked before it runs.
_APART = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_VIEW = "aten.reshape.default"


@dataclass(frozen=True, eq=False)
class FusedKernels:
    """The kernels of a graph. ``shares``: of each operation that shares a kernel, and of views, by name. ``inside``:
    values and the operations that get them without going through memory. ``classes``: the node whose entries each node
    has."""

    kernels: Kernels
    shares: Mapping[str, Share]
    inside: frozenset[tuple[Value, str]]
    classes: Mapping[str, str]

    @staticmethod
    def of(graph: Graph, device: Device) -> FusedKernels:
        """The kernels of a concrete graph with saved activations on such a device."""
        kernels, apart = compiled_kernels(graph, device)
        fused = [kernel for kernel in kernels.kernels if kernel.heavy is None and not _runs_alone(kernel)]
        shares = {node.name: FREE for node in kernels.graph.nodes if node.op in VIEWS}
        for kernel in fused:
            shares.update(shares_of(kernels.graph, kernel))
        shares |= {name: share_of_both(shares[name], shares[copy]) for copy, name in apart.items()}
        numbers = {node.name: number for number, kernel in enumerate(fused) for node in kernel.nodes}
        classes = graph.classes or fold_layers(graph).classes
        inside = {
            (Value(classes.get(value.node, value.node), value.index), classes.get(consumer, consumer))
            for value, consumer in (*_inside(kernels.graph, numbers), *_into_products(graph, kernels.graph))
        }
        return FusedKernels(kernels, shares, frozenset(inside), classes)

    @staticmethod
    def of_layers(graph: Graph, device: Device) -> FusedKernels:
        """:meth:`of` a graph with classes, as far as prices need it: ``kernels`` are those of few layers."""
        return replace(FusedKernels.of(FewLayers()(graph), device), classes=graph.classes)

    def share_of(self, node: Node) -> Share | None:
        """The share of a node, or of the one that it is a copy of; None if it is no part of a fused kernel."""
        return self.shares.get(self.entry(node.name))

    def is_inside(self, value: Value, consumers: Iterable[str]) -> bool:
        """Whether one of the operations ``consumers`` gets ``value`` without going through memory, if it is not
        resharded."""
        known = Value(self.entry(value.node), value.index)
        return any((known, self.entry(consumer)) in self.inside for consumer in consumers)

    def entry(self, name: str) -> str:
        """The node whose share the node ``name`` has, and the values inside of whose kernel."""
        name = name if name in self.classes else _COPY.sub("", name)
        return self.classes.get(name, name)


def compiled_kernels(graph: Graph, device: Device) -> tuple[Kernels, Mapping[str, str]]:
    """The kernels of a graph whose pieces are compiled for such a device, and the operations that are two there
    (:mod:`autopar.cost.kernels.sums_apart`). On CPUs Inductor joins tensors by a kernel for each that does not compute
    it (``cat`` in ``torch/_inductor/lowering.py``, 2.13)."""
    whole: Graph = _with_biases(graph)
    apart: Mapping[str, str] = {}
    if not device.is_gpu:
        whole, apart = with_sums_apart(whole)
    piece = _pieces(whole)

    def parted(producer: Node, consumer: Node) -> bool:
        return piece[producer.name] != piece[consumer.name]

    def size(value: Value) -> int:
        return int(whole.type_of(value).bytes)

    native = _native_results(graph)
    fusing = Fusing(
        device.is_gpu, looks_up=True, one_hot=False, joined=device.is_gpu, kept=lambda node: node.name in native
    )
    return find_kernels(whole, parted, _is_eager, size, fusing), apart


def _native_results(graph: Graph) -> frozenset[str]:
    """The operations in whose place torch's own, such as log-softmax, run on one device. What these compute is saved
    for backward as it is."""
    replicated = (REPLICATE,)
    strategies = {
        node.name: Strategy((replicated,) * len(node.operands), (replicated,) * len(node.types)) for node in graph.nodes
    }
    restored, _ = restore(graph, Assignment((1,), strategies, {}))
    return frozenset(node.name for node in restored.nodes if node.name not in graph or graph[node.name].op != node.op)


def _with_biases(graph: Graph) -> Graph:
    """The graph with views in place of sums that are fused with a product."""
    whole = Strategy((), ((),))
    sums = biased_products(graph, lambda node: replace(whole, inputs=((),) * len(node.operands)))
    products = {name: Value(product) for name, product in sums.items()}
    nodes = (
        replace(node, op=_VIEW, args=(products[node.name], node.type.shape), kwargs=()) if node.name in sums else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _pieces(graph: Graph) -> Mapping[str, tuple[str, int]]:
    """The phase of each operation and the number of its piece there: another begins with each layer. What the model's
    own forward does belongs to the piece before it. Phases are sections of their own, so that an operation of backward
    among those of forward, such as a view of a saved value, ends no piece."""
    layers, pieces = layers_among({node.module for node in graph.nodes}), dict[str, tuple[str, int]]()
    numbers, blocks = {"forward": 0, "backward": 0}, {"forward": "", "backward": ""}
    for node in graph.nodes:
        if node.is_placeholder:
            continue
        block = outermost_layer(node.module, layers) if node.module else blocks[node.phase]
        numbers[node.phase] += block != blocks[node.phase]
        blocks[node.phase] = block
        pieces[node.name] = node.phase, numbers[node.phase]
    return pieces


@cache
def _is_eager_operation(op: str) -> bool:
    if not op.startswith(("aten.", "prims.")):
        return True
    _, name, overload = (*op.split("."), "default")[:3]
    operation = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return isinstance(operation, OpOverload) and any(tag in operation.tags for tag in _APART)


def _runs_alone(kernel: Kernel) -> bool:
    """Whether a kernel is an operation that is not compiled, or a draw with nothing to share its kernel."""
    return _is_eager(kernel.nodes[0]) or all(node.op in STREAMED or is_alias(node) for node in kernel.nodes)


def _is_eager(node: Node) -> bool:
    """Whether an operation runs as it is, outside of compiled pieces."""
    if is_alias(node) or is_lookup(node) or node.op in STREAMED:
        return False
    return _is_eager_operation(node.op)


def _into_products(graph: Graph, with_biases: Graph) -> Iterator[tuple[Value, str]]:
    """The results of products, and the sums that are computed with them."""
    both = ((node, with_biases[node.name]) for node in graph.nodes)
    yield from ((joined.operands[0], node.name) for node, joined in both if joined.op != node.op)


def _inside(graph: Graph, numbers: Mapping[str, int]) -> Iterator[tuple[Value, str]]:
    for node in graph.nodes:
        for value in node.operands:
            made = origin(graph, value).node
            if made in numbers and all(numbers.get(reader) == numbers[made] for reader in _read_by(graph, node, made)):
                yield value, node.name


def _read_by(graph: Graph, node: Node, made: str) -> list[str]:
    """The operations that read a value through ``node`` in the phase in which ``made`` computes it."""
    if not is_alias(node):
        return [node.name]
    phase = graph[made].phase
    found = [reader.name for reader in readers(graph, Value(node.name)) if reader.phase == phase]
    return found or [""]
