"""Seconds of operations under a recipe: products in fp8 with their casts, modules that run operation by operation, and
the host's launches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from autopar.cost import compute_seconds, family_of, node_seconds
from autopar.cost.compute.op_families import DRAW
from autopar.cost.compute.roofline import is_masked
from autopar.cost.kernels.kernel import Kernels, is_alias, origin, readers
from autopar.ir.node import Node, TensorType, Value
from autopar.ir.placements import Strategy
from autopar.placement.axis_names import weight_values
from autopar.planner.roles.expert_blocks import OPERATIONS, routers
from benchmarks.emulator.sections.kernel_seconds import PRODUCTS, KernelPrices
from benchmarks.emulator.sections.placement import Placed
from benchmarks.emulator.sections.section_of_node import AFTER, BEFORE

from .fp8 import FP8, are_cast
from .modules import launches_as_graph, matches
from .recipe import Recipe


class RecipeKernels(KernelPrices):
    """Prices operations under a recipe."""

    layout: Recipe

    def __init__(self, placed: Placed, section_of_node: Mapping[str, str], layout: Recipe, kernels: Kernels) -> None:
        super().__init__(placed, section_of_node, layout, kernels)
        chosen_by = routers(self.graph)
        self.routing = {node.module for node in self.graph.nodes if any(v.node in chosen_by for v in node.operands)}
        self.weights = weight_values(self.graph)
        self.fp8 = frozenset(node.name for node in self.graph.nodes if self._is_fp8(node))
        # The sources of recomputed values.
        self.sources = frozenset(source for sources in kernels.rematerialised.values() for source in sources)
        # The first product that each value is cast for.
        self.cast: dict[Value, str] = {}
        for kernel in kernels.kernels:
            if kernel.heavy is not None and self.is_fp8(kernel.heavy):
                for value in kernel.heavy.operands:
                    self.cast.setdefault(origin(self.graph, value), kernel.heavy.name)

    @cached_property
    def cast_weights(self) -> frozenset[str]:
        """Parameters that products read in fp8, by node name."""
        operands = {origin(self.graph, value).node for name in self.fp8 for value in self.graph[name].operands}
        return frozenset(name for name in operands if self.graph[name].op == "param")

    def kept(self, value: Value) -> int:
        """If only fp8 products read a value in backward, its cast by columns is saved."""
        users = [user for user in readers(self.graph, value) if user.phase == "backward"]
        if users and value not in self.sources and all(map(self.is_fp8, users)):
            return self.local(value) // self.graph.type_of(value).dtype.itemsize * FP8.itemsize
        return super().kept(value)

    def running(self, node: Node) -> float:
        return self._running(node) * self._attention_factor(node)

    def _attention_factor(self, node: Node) -> float:
        """How many times as long fused attention takes as the device's, by the recipe's rates."""
        if not self.layout.attention or not family_of(node.op).is_attention:
            return 1.0
        rates = self.layout.attention_rates(is_masked(node))
        if rates is None:
            return 1.0
        device = self.prices.cluster.device
        return (device.masked_attention if is_masked(node) else 1.0) / rates[node.phase == "backward"]

    def _running(self, node: Node) -> float:
        if self.is_fp8(node):
            return self._casting_seconds(node) + self._fp8_seconds(node) * self.misalignment_factor(node)
        if not self.is_eager(node):
            return super().running(node)
        # Other libraries draw in the kernel that writes the numbers, unlike the runtime.
        if family_of(node.op) is DRAW:
            drawn = sum(self.local(Value(node.name, index)) for index in range(len(node.types)))
            return compute_seconds(self.prices.cluster, 0.0, drawn, torch.float32)
        return 0.0 if is_alias(node) or family_of(node.op).is_view else self.planned(self.prices.uncompiled, node)

    def strategy(self, node: Node) -> Strategy:
        is_balanced = self.layout.context_load_balancing
        return super().strategy(node) if is_balanced else self.assignment.strategies[node.name]

    def is_eager(self, node: Node) -> bool:
        """Whether an operation runs by itself."""
        return matches(node.module, self.layout.eager)

    def host_seconds(self, node: Node) -> float:
        """Seconds that the host takes for an operation's part of the launch of its kernel."""
        if node.op in OPERATIONS or launches_as_graph(node.module, self.layout):
            return 0.0
        return self._launches(node) * self.prices.cluster.device.host_seconds

    def _launches(self, node: Node) -> float:
        """The kernels that an operation launches, or its share of one."""
        fused = self.prices.fused
        share = None if self.is_eager(node) or fused is None else fused.share_of(node)
        if share is not None:
            return share.launches
        return float(not (node.is_placeholder or is_alias(node) or family_of(node.op).is_view))

    def is_fp8(self, node: Node) -> bool:
        return node.name in self.fp8

    def _is_fp8(self, node: Node) -> bool:
        """Whether the recipe computes a node in fp8: products with weights, or for their gradients, in layers. Products
        outside of layers (the head, but for ``fp8_head``) and routers keep their dtype. So do products that libraries
        do not multiply in fp8: dims of weights, and for their gradients the number of tokens that they sum over, must
        be multiples of 16 (``torch._scaled_mm``; in other products tokens are the rows of the first operand, of which
        there may be any number)."""
        outside = (BEFORE,) if self.layout.fp8_head else (BEFORE, AFTER)
        if self.layout.precision != "fp8" or self.section_of_node[node.name] in outside:
            return False
        if node.op not in PRODUCTS or node.module in self.routing:
            return False
        matrix = family_of(node.op).matrix
        if matrix is None:
            return False
        m, n, k = matrix(*self.local_types(node))
        dims = (n, k) if node.operands[-1].node in self.weights else (m, n, k)
        return are_cast(*dims)

    def _fp8_seconds(self, node: Node) -> float:
        inputs, outputs = self.local_types(node)
        inputs = tuple(TensorType(kind.shape, FP8) for kind in inputs)
        return node_seconds(self.prices.cluster, node, inputs, outputs, self.strategy(node).local)

    def _casting_seconds(self, node: Node) -> float:
        """Seconds of casting a product's operands to fp8, by rows and by columns. Each value is cast once, and values
        of elementwise kernels not at all, since these write fp8 themselves. Weights are cast once for all
        microbatches."""
        operands = [origin(self.graph, value) for value in node.operands]
        cast_here = [v for v in operands if self.cast[v] == node.name]
        moved = sum(
            2.0 * self.local(v) for v in cast_here if v.node in self.kernels.of and self.kernels.of[v.node].heavy
        )
        return compute_seconds(self.prices.cluster, 0.0, moved, torch.float32) if moved else 0.0
