"""Bytes that sections of a recipe save for backward: without modules that it recomputes, with inputs that callers
retain."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from autopar.cost.kernels.kernel import origin
from autopar.ir.node import Node, Value
from autopar.ir.placements import Placements
from benchmarks.emulator.sections.kernel_seconds import KernelPrices
from benchmarks.emulator.sections.saved_activations import Saved
from benchmarks.emulator.sections.section_of_node import AFTER

from .modules import matches, matches_whole
from .recipe import Recipe
from .recomputed import recomputed_operations, rematerialised_nodes


class RecipeSaved(Saved):
    """Saved activations of all sections of a recipe.

    Attributes:
        again: what backward recomputes of the modules that the recipe names.
        repeated: the operations that run once more, by kind of recomputation.
        kept: bytes of the values that forward saves for backward or for recomputation.
    """

    layout: Recipe

    def __init__(self, priced: KernelPrices, moved: Set[tuple[Value, str]]) -> None:
        super().__init__(priced, moved)
        self.again = recomputed_operations(priced.kernels, self._is_recomputed, self.section_of_node)
        elementwise = self.inside | rematerialised_nodes(self.graph, self.rematerialised)
        self.repeated = {"recomputed": self.again.nodes, "selective": self.inside, "elementwise": elementwise}
        taken = (value for value in self.again.taken if value.node in self.varying)
        self.kept = {**self.read, **{value: priced.kept(value) for value in taken}}

    def of(self, name: str) -> dict[str, Any]:
        here = [value for value in self.kept if self.section_of_node[value.node] == name]
        saved = [value for value in here if value not in self.again.dropped]
        found, held = self.of_values(saved, self.kept), self._retained_by_callers(name)
        return {
            **found,
            "saved": found["saved"] + held,
            "saved_last": found["saved_last"] + (held if name == AFTER else 0),
        }

    def saved_again(self, name: str) -> int:
        """Bytes that backward recomputes of a section's modules that the recipe names."""
        here = (value for value in self.again.dropped if self.section_of_node[value.node] == name)
        return sum(self.kept[value] for value in here)

    def _retained_by_callers(self, name: str) -> int:
        """Bytes of the inputs that modules of :attr:`Recipe.retained_inputs` get from other modules, and of the copies
        that collectives make of them, unless these are retained anyway; recomputed values would not be."""
        sizes: dict[tuple[Value, Placements], int] = {}
        for use in self.operands(name):
            source = origin(self.graph, use.value)
            if not self._is_retained(use.consumer) or not self._is_made_elsewhere(source):
                continue
            if use.target != use.source or source not in self.kept or source in self.again.dropped:
                sizes[source, use.target] = self.taken(use)
        return sum(sizes.values())

    def _is_made_elsewhere(self, value: Value) -> bool:
        return value.node in self.varying and not self._is_retained(value.node)

    def _is_retained(self, name: str) -> bool:
        return matches(self.graph[name].module, self.layout.retained_inputs)

    def _is_recomputed(self, node: Node) -> bool:
        return matches_whole(node.module, self.layout.recomputed)
