"""Places every tensor of a recipe: modules that every tensor rank computes in full, and how gradients are reduced."""

from __future__ import annotations

from typing import ClassVar

from torch.distributed.tensor import Partial

from autopar.cost import family_of
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.node import Node, TensorType
from autopar.ir.placements import is_shard
from autopar.placement.choices import Choice
from autopar.placement.constraints import Allowed
from autopar.placement.formulation import Instance
from autopar.planner.roles.divides import check_sequences, check_tensor, heads_and_experts
from benchmarks.emulator.sections.placement import Placing
from benchmarks.emulator.stored import TENSOR

from .modules import matches
from .recipe import Recipe


class RecipePlacing(Placing):
    """Places the tensors of a recipe."""

    layout: Recipe
    reads: ClassVar[tuple[str, ...]] = (
        *Placing.reads,
        *("operands", "separate_dgrad_reductions", "replicated", "hides_input_gradients"),
    )

    @property
    def hides(self) -> bool:
        return self.layout.hides_input_gradients

    def check(self, graph: Graph) -> None:
        check_sequences(graph, self.layout.context, self.layout, advised=True)
        counts = {node: count for node, count in heads_and_experts(graph) if not self._is_replicated(node)}
        check_tensor(counts, self.layout.tensor, self.layout, advised=True)

    def rules(self, instance: Instance) -> tuple[Allowed, ...]:
        rules = super().rules(instance)
        rules += (self._shards_nothing,) if self.layout.replicated else ()
        return (*rules, self._reduced_separately(instance.graph)) if self.layout.separate_dgrad_reductions else rules

    def saved(self, instance: Instance) -> Allowed:
        """With ``operands="whole"`` operands of products are saved as they were gathered."""
        return super().saved(instance) if self.layout.operands == "shards" else lambda node, choice: True

    def gathered(self, graph: Graph) -> frozenset[TensorType]:
        """Those of the operands of replicated modules."""
        return frozenset(
            graph.type_of(value)
            for node in filter(self._is_replicated, graph.nodes)
            for value in node.operands
            if not self._is_replicated(graph[value.node])
        )

    def _is_replicated(self, node: Node) -> bool:
        return matches(node.module, self.layout.replicated)

    def _shards_nothing(self, node: Node, choice: Choice) -> bool:
        """Operations of replicated modules shard nothing on the tensor axis."""
        if isinstance(choice, ParameterPlacement) or node.is_placeholder or not self._is_replicated(node):
            return True
        return not any(is_shard(place[TENSOR]) for place in choice.inputs)

    def _reduced_separately(self, graph: Graph) -> Allowed:
        """Input gradients of products in modules of ``separate_dgrad_reductions`` are reduced before anything reads
        them."""

        def summed(name: str) -> bool:
            node = graph[name]
            is_product = node.phase == "backward" and family_of(node.op).matrix is not None
            return is_product and matches(node.module, self.layout.separate_dgrad_reductions)

        def allowed(node: Node, choice: Choice) -> bool:
            if isinstance(choice, ParameterPlacement) or node.is_placeholder:
                return True
            partial = (isinstance(place[TENSOR], Partial) for place in choice.inputs)
            return not any(is_sum and summed(value.node) for is_sum, value in zip(partial, node.operands, strict=True))

        return allowed
