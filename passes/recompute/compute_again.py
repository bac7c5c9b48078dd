"""Computes elementwise values again in backward instead of saving them, from values that are saved in any case.

Compiled code computes them inside of the kernel that reads them, and in forward never stores them unless they are
saved. So where backward reads a result of elementwise operations, such as a normalised value or that of an activation
function, and these start from other saved values, it computes a copy of its own:

    %h: f32[4, 4] = aten.mm.default(%x, %w)
    %t: f32[4, 4] = aten.tanh.default(%h)
    %y: f32[4, 4] = aten.mul.Tensor(%t, %h)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %t)
    backward %f: f32[4, 4] = aten.mul.Tensor(%d, %h)

becomes::

    %h: f32[4, 4] = aten.mm.default(%x, %w)
    %t: f32[4, 4] = aten.tanh.default(%h)
    %y: f32[4, 4] = aten.mul.Tensor(%t, %h)
    backward %t_anew: f32[4, 4] = aten.tanh.default(%h)
    backward %g: f32[4, 4] = aten.mul.Tensor(%d, %t_anew)
    backward %f: f32[4, 4] = aten.mul.Tensor(%d, %h)

A product is saved in place of a sum with it that has more bytes, such as a residual stream in 32 bits. Operands of
products in backward are saved, since a product reads them from memory, and so are values that one layer
hands to another, so that backward of a layer starts from its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from autopar.ir.graph import Graph
from autopar.ir.module_paths import layers_among, outermost_layer
from autopar.ir.node import VIEWS, Node, Value
from autopar.passes.base import Pass

from .backward_copies import is_step, with_copies
from .saved_values import saved_values

ANEW = "_anew"
"""How the names of copies end."""
# Operations that are computed again for one value.
# Chosen: an activation function has about ten; not measured.
_MOST_STEPS = 16
# Reductions, which share kernels with what they reduce.
_REDUCTIONS = frozenset(
    f"aten.{name}" for name in ("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "amax.default")
)

# Products, whose results are stored in any case.
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))


@dataclass(frozen=True)
class ComputeAgain(Pass):
    """Backward computes elementwise values again from those that are saved anyway; see the module docstring."""

    name: ClassVar[str] = "compute-again"

    def apply(self, graph: Graph) -> Graph:
        return compute_again(graph)


def compute_again(graph: Graph) -> Graph:
    """See :class:`ComputeAgain`."""
    return with_copies(graph, dict(_Forward(graph).chains()), ANEW)


@dataclass(frozen=True, eq=False)
class _Forward:
    graph: Graph

    @cached_property
    def layers(self) -> Mapping[str, str]:
        """The layer of each operation; "" if it is in none."""
        paths = layers_among({node.module for node in self.graph.nodes})
        of_module = {module: outermost_layer(module, paths) for module in {node.module for node in self.graph.nodes}}
        return {node.name: of_module[node.module] for node in self.graph.nodes}

    def chains(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The values that need not be saved, with the operations that compute them from those that are."""
        saved = saved_values(self.graph)
        kept = set(saved)
        for value in saved:
            node = self.graph[value.node]
            if is_step(node) and node.op not in VIEWS and self._is_fused(value, node):
                kept.discard(value)
                chain, product = self._chain(node, kept)
                kept |= {value} if not chain else {product} if product is not None else set()
                if chain:
                    yield value.node, chain

    def _is_fused(self, value: Value, made: Node) -> bool:
        """Whether forward uses a value in its own layer alone, and backward in what shares kernels."""
        for user, _ in self.graph.users.get(value, ()):
            if self.layers[user.name] != self.layers[made.name]:
                return False
            if user.op in VIEWS:
                if not self._is_fused(Value(user.name), made):
                    return False
            elif user.phase == "backward" and not (is_step(user) or user.op in _REDUCTIONS):
                return False
        return value not in self.graph.output_values

    def _chain(self, made: Node, kept: set[Value]) -> tuple[tuple[str, ...], Value | None]:
        """The elementwise operations of its layer that compute ``made`` from values that backward has anyway, in order,
        and a product to save in its place, if they need one; none if they need more, or parameters and inputs alone."""
        steps, waiting, bases = {made.name}, list(made.operands), set[Value]()
        while waiting:
            value = waiting.pop()
            node = self.graph[value.node]
            if value in kept:
                bases.add(value)
            elif not node.is_placeholder and node.name not in steps:
                if self.layers[node.name] != self.layers[made.name] or len(steps) >= _MOST_STEPS:
                    return (), None
                if node.op in _PRODUCTS:
                    bases.add(value)
                elif is_step(node):
                    steps.add(node.name)
                    waiting += node.operands
                else:
                    return (), None
        products = bases - kept
        if not bases or len(products) > 1 or not all(self._is_smaller(product, made) for product in products):
            return (), None
        return tuple(sorted(steps, key=self._place.__getitem__)), next(iter(products), None)

    def _is_smaller(self, value: Value, than: Node) -> bool:
        """Whether a value has as many elements, of fewer bytes each."""
        kind = self.graph.type_of(value)
        return kind.numel == than.type.numel and kind.dtype.itemsize < than.type.dtype.itemsize

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {node.name: place for place, node in enumerate(self.graph.nodes)}
