"""Prices one microbatch of a recipe on one device, section by section of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import cycle
from typing import ClassVar

from autopar.cost import family_of
from autopar.cost.kernels.kernel import readers
from autopar.ir.assignment import Use
from autopar.ir.node import Node, TensorType, Value
from autopar.placement.prices import local_type
from benchmarks.emulator.sections.kernel_seconds import PRODUCTS
from benchmarks.emulator.sections.section import Seconds, Section, Weight
from benchmarks.emulator.sections.section_costs import SectionPricer

from .fp8 import are_cast
from .kernels import RecipeKernels
from .modules import matches
from .recipe import Recipe
from .saved import RecipeSaved
from .section import RecipeSection, RecipeWeight, with_host


class RecipeSections(SectionPricer):
    """Prices sections under a recipe."""

    layout: Recipe
    priced: RecipeKernels
    saved: RecipeSaved
    reads: ClassVar[tuple[str, ...]] = (
        *SectionPricer.reads,
        *("eager", "cuda_graphs", "context_load_balancing", "retained_inputs", "recomputed"),
        *("gradients", "gradient_accumulation_fusion", "attention", "fp8_head"),
    )
    kernel_prices: ClassVar[type[RecipeKernels]] = RecipeKernels
    saved_activations: ClassVar[type[RecipeSaved]] = RecipeSaved

    def runs_alone(self, node: Node) -> bool:
        return matches(node.module, self.layout.eager)

    def section(self, name: str) -> Section:
        """Half of the seconds of forward's collectives are assumed to be reductions, whose results
        ``recompute="operations"`` saves, and half gathers, which it repeats."""
        section = super().section(name)
        first, second = (self.operations(name, phase) for phase in ("forward", "backward"))
        kept = list(self._kept(first))
        found = RecipeSection(
            **{field.name: getattr(section, field.name) for field in fields(section)},
            kept=Seconds(self.computing(kept), section.forward.communicate / 2),
            saved_kept=sum(self.priced.local(Value(node.name)) for node in kept),
            again=self._repeating(name, first),
            saved_again=self.saved.saved_again(name),
        )
        return with_host(found, self._host(first, section.forward), self._host(second, section.backward))

    def _host(self, operations: Iterable[Node], seconds: Seconds) -> float:
        """Seconds for which a device waits for the host, if launches take longer than operations and collectives."""
        return max(0.0, sum(map(self.priced.host_seconds, operations), 0.0) - seconds.total)

    def _kept(self, forward: Iterable[Node]) -> Iterator[Node]:
        """The operations that ``recompute="operations"`` does not repeat: attention, and every other product with
        weights."""
        is_kept = cycle((True, False))
        for node in forward:
            if family_of(node.op).is_attention or (node.op in PRODUCTS and next(is_kept)):
                yield node

    def _repeating(self, name: str, forward: Iterable[Node]) -> Seconds:
        """The cost of repeating modules that the recipe names as recomputed."""
        again = [node for node in forward if node.name in self.saved.again.nodes]
        moves = (use for use in self.moves if use.role == "operand" and use.phase == "forward")
        repeated = (
            use
            for use in moves
            if use.consumer in self.saved.again.nodes and self.section_of_node[use.consumer] == name
        )
        return Seconds(self.computing(again), sum(map(self.exposed, repeated), 0.0))

    def waiting(self, use: Use) -> float:
        """With ``"tensor"`` in ``overlap`` collectives are sent in pieces under the products next to them, which
        :class:`.times.RecipeTimes` prices."""
        return super().waiting(use) if self.layout.hides_input_gradients else self.resharding(use)

    def adds_up(self, node: Node) -> bool:
        return self.layout.gradient_accumulation_fusion and super().adds_up(node)

    def weight(self, node: Node, name: str) -> Weight:
        weight, place = super().weight(node, name), self.assignment.parameters[node.name].weight
        cast = self._is_cast(node, local_type(node.type, place, self.prices.mesh))
        own = {field.name: getattr(weight, field.name) for field in fields(weight)}
        return RecipeWeight(**own, cast=cast, again=self._taken_again(node, name))

    def _taken_again(self, node: Node, name: str) -> frozenset[str]:
        """The kinds of recomputation in which a section reads a parameter once more."""
        users = {user.name for user in readers(self.graph, Value(node.name)) if user.phase == "forward"}
        here = {user for user in users if self.section_of_node[user] == name}
        return frozenset(way for way, nodes in self.saved.repeated.items() if here & nodes)

    def _is_cast(self, node: Node, local: TensorType) -> bool:
        """Whether products read a parameter in fp8; of parameters with an entry for each expert, the matrices."""
        if node.name not in self.expert_weights:
            return node.name in self.priced.cast_weights
        return self.layout.precision == "fp8" and local.rank == 3 and are_cast(*map(int, local.shape[1:]))
