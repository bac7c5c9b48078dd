"""Places every tensor of a layout: the placement program, restricted by the layout.

One data rank's share of a step is placed on the mesh (context, tensor). On the context axis inputs are sharded along
their dim 1, the sequence, and weights are replicated. On the tensor axis inputs are replicated, every matrix of weights
is sharded, and no weight is gathered. Solving decides which matrix is sharded by rows and which by columns, so that
communication is least. Without sequence parallelism no activation may be sharded along the sequence on the tensor axis.
With it, operands of products are saved in shards and gathered again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.distributed.tensor import Shard

from autopar.cluster.description import Cluster
from autopar.cost import family_of
from autopar.cost.kernels.kernel import readers
from autopar.errors import OptionsError
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, TensorType, Value
from autopar.ir.placements import REPLICATE, Placement, Strategy, is_shard
from autopar.ir.reshard import Hop, Sent
from autopar.layout import Layout
from autopar.ops.exchanged_experts import EXCHANGES
from autopar.passes.annotate.annotate import annotate
from autopar.passes.annotate.fold import fold_layers
from autopar.placement.choices import Choice
from autopar.placement.constraints import Allowed, with_choices
from autopar.placement.formulation import Instance, build_instance
from autopar.placement.fused_kernels import FusedKernels
from autopar.placement.prices import Prices, exchanged_bytes, placement_options
from autopar.planner.roles.divides import check_sequences, check_tensor, heads_and_experts
from autopar.planner.roles.expert_blocks import routers
from autopar.solver.problem import Solution, evaluate
from autopar.solver.solve import solve
from benchmarks.emulator.stored import CONTEXT, TENSOR

from .exposed_communication import scattering, with_exposed_prices

# The time limit in seconds of counted work, so that prices do not depend on how busy the machine is.
# Chosen: as Options.time_limit.
SECONDS = 60.0
# Chosen: half of Options.gap, since layouts that are compared may be a percent apart.
GAP = 0.005
# How often the program is solved; each time the prices follow from the solution before.
# Chosen: planning takes as many times as long (docs/layouts.md, "The gap").
ROUNDS = 2


@dataclass(frozen=True, eq=False)
class Placed:
    """A step graph of one microbatch and its placements on the mesh (context, tensor). ``gap``: the optimality gap of
    its placement program, at the prices with which it was solved."""

    graph: Graph
    assignment: Assignment
    prices: Prices
    gap: float = 0.0


class Placing:
    """Places the tensors of a layout. ``reads``: the names of what layouts say that placements depend on."""

    reads: ClassVar[tuple[str, ...]] = ("tensor", "context", "microbatch", "sequence_parallel")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def place(self, graph: Graph, fused: FusedKernels, cluster: Cluster, multiplicity: Mapping[str, int]) -> Placed:
        """The placements; ``fused``: the kernels of the graph; ``multiplicity``: how many nodes of the whole model each
        node represents. Raises :class:`OptionsError` if the model cannot be divided so."""
        self.check(graph)
        annotated = annotate(graph, (self.layout.context, self.layout.tensor))
        folded = fold_layers(annotated, 1)
        for prices, scatters in self._prices(annotated, fused, cluster):
            instance = build_instance(folded, prices, optimizer="sgd", memory_limit=math.inf, multiplicity=multiplicity)
            instance = with_choices(instance, _all_of(*self.rules(instance)))
            solution = self._solved(scattering(instance) if scatters else instance)
            if solution.status != "infeasible":
                return Placed(annotated, instance.assignment(solution.choices), prices, solution.gap)
        raise OptionsError(
            f"the model cannot be laid out as {self.layout}: no placements allow the communication it would need"
        )

    def check(self, graph: Graph) -> None:
        """Raises :class:`OptionsError` if the layout does not divide the graph of a step."""
        check_sequences(graph, self.layout.context, self.layout, advised=True)
        check_tensor(dict(heads_and_experts(graph)), self.layout.tensor, self.layout, advised=True)

    def rules(self, instance: Instance) -> tuple[Allowed, ...]:
        """What every choice of the program must fulfil."""
        return _weights(instance), _inputs(self.layout), _without_exchange, self.saved(instance)

    @property
    def hides(self) -> bool:
        """Whether collectives of inputs' gradients overlap products."""
        return True

    def saved(self, instance: Instance) -> Allowed:
        """How values are saved for backward: with sequence parallelism operands of products in shards if they can be
        (Korthikanti et al. 2022, section 4.2.2)."""
        return _saved_in_shards(instance) if self.layout.sequence_parallel else lambda node, choice: True

    def gathered(self, graph: Graph) -> frozenset[TensorType]:
        """The types of values that tensor ranks without sequence parallelism may gather if all-reduces are enough for
        all others."""
        return frozenset()

    def _solved(self, instance: Instance) -> Solution:
        """The placements at the prices of the cost breakdown. If the solution costs more by its own cost breakdown than
        the program predicted, it is solved again, from there. Returns the solution that costs less by its own
        breakdown."""
        priced = with_exposed_prices(instance, self.hides)
        candidates: list[tuple[float, Solution]] = []
        for _ in range(ROUNDS):
            incumbents = [candidate.choices for _, candidate in candidates]
            solution = solve(priced.problem, time_limit=SECONDS, gap=GAP, incumbents=incumbents, counted=True)
            if solution.status == "infeasible":
                break
            priced = with_exposed_prices(instance, self.hides, solution.choices)
            candidates.append((evaluate(priced.problem, solution.choices), solution))
            if candidates[-1][0] <= (1 + GAP) * solution.objective:
                break
        return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else solution

    def _prices(self, annotated: Graph, fused: FusedKernels, cluster: Cluster) -> Iterator[tuple[Prices, bool]]:
        """The prices to place at, and whether sums of products must be scattered (:func:`scattering`).

        Without sequence parallelism the first prices allow only all-reduces. If these are not enough (a normalisation
        between two sharded matrices, as in latent attention), values may be gathered. With sequence parallelism the
        first prices require that values are gathered and sums scattered."""
        mesh = self.layout.context, self.layout.tensor
        options, exchanged = placement_options(annotated, mesh), exchanged_bytes(annotated)
        if self.layout.sequence_parallel:
            yield Scattering(cluster, mesh, options, exchanged, fused=fused), True
            yield Prices(cluster, mesh, options, exchanged, fused=fused), False
            return
        for passing in (self.gathered(annotated), frozenset(options)):
            yield ReducedOnly(cluster, mesh, options, exchanged, fused=fused, gathered=passing), False


def _without_exchange(node: Node, choice: Choice) -> bool:
    """Rows do not travel over the context and tensor axes: their exchange between expert ranks is priced apart."""
    return isinstance(choice, ParameterPlacement) or choice.local.removeprefix("autopar.") not in EXCHANGES


@dataclass(frozen=True, eq=False)
class ReducedOnly(Prices):
    """Prices that forbid everything but all-reduces on the tensor axis, except for values of the types ``gathered``."""

    gathered: frozenset[TensorType] = frozenset()

    def hop(self, kind: TensorType, hop: Hop, *, sent: Sent = "alone") -> float:
        if kind in self.gathered and hop.kind in ("all_gather", "slice"):
            return super().hop(kind, hop, sent=sent)
        if TENSOR in hop.axes and hop.kind not in ("all_reduce", "partial"):
            return math.inf
        return super().hop(kind, hop, sent=sent)


@dataclass(frozen=True, eq=False)
class Scattering(Prices):
    """Prices that forbid all-to-alls on the tensor axis. Values between two products are sharded along the sequence or
    along the dim that the products shard, and every known system goes from one to the other by gathering."""

    def hop(self, kind: TensorType, hop: Hop, *, sent: Sent = "alone") -> float:
        if TENSOR in hop.axes and hop.kind == "all_to_all":
            return math.inf
        return super().hop(kind, hop, sent=sent)


def _all_of(*rules: Allowed) -> Allowed:
    return lambda node, choice: all(rule(node, choice) for rule in rules)


def _weights(instance: Instance) -> Allowed:
    """Weights are replicated on the context axis. Matrices other than routers are sharded on the tensor axis if they
    can be. Gradients and states are placed as weights."""
    chosen_by = routers(instance.graph)
    divisible = {
        name
        for name, choices in zip(instance.names, instance.choices, strict=True)
        if any(isinstance(choice, ParameterPlacement) and is_shard(choice.weight[TENSOR]) for choice in choices)
    }

    def allowed(node: Node, choice: Choice) -> bool:
        if not isinstance(choice, ParameterPlacement):
            return True
        weight = choice.weight
        if weight[CONTEXT] != REPLICATE or not weight == choice.gradient == choice.optimizer:
            return False
        matrix = (
            node.type.rank > 1
            and node.name not in chosen_by
            and instance.graph.classes.get(node.name, node.name) in divisible
        )
        return not matrix or is_shard(weight[TENSOR])

    return allowed


def _saved_in_shards(instance: Instance) -> Allowed:
    """Operands of products are saved in shards if they can be."""
    graph = instance.graph
    saved = {node.name for node in graph.nodes if node.op == SAVED_ACTIVATION and _feeds_product(graph, node)}
    divisible = {
        name
        for name, choices in zip(instance.names, instance.choices, strict=True)
        if name in saved
        and any(isinstance(choice, Strategy) and is_shard(choice.outputs[0][TENSOR]) for choice in choices)
    }

    def allowed(node: Node, choice: Choice) -> bool:
        must_shard = node.op == SAVED_ACTIVATION and graph.classes.get(node.name, node.name) in divisible
        return not must_shard or isinstance(choice, ParameterPlacement) or is_shard(choice.outputs[0][TENSOR])

    return allowed


def _feeds_product(graph: Graph, node: Node) -> bool:
    """Whether a matrix product reads a node's result, also through views."""
    return any(family_of(user.op).matrix is not None for user in readers(graph, Value(node.name)))


def _inputs(layout: Layout) -> Allowed:
    """Inputs are sharded along the sequence on the context axis, and replicated on the tensor axis."""
    context: Placement = Shard(1) if layout.context > 1 else REPLICATE

    def allowed(node: Node, choice: Choice) -> bool:
        if node.op != "input" or isinstance(choice, ParameterPlacement):
            return True
        place = choice.outputs[0]
        return place[TENSOR] == REPLICATE and place[CONTEXT] == (context if node.type.rank > 1 else REPLICATE)

    return allowed
