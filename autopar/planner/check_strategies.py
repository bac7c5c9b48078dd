"""Checks that each operation of a graph can run as a plan says: its strategy is one that the rules offer.

Rules are tested by execution. A strategy that they do not offer may compute something else without any error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Partial

from autopar.errors import PlanMismatchError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import RECOMPUTED, SAVED_ACTIVATION, Node
from autopar.ir.placements import PARTIAL_SUM, Placements, Strategy, short
from autopar.ir.plan_record import PlanRecord
from autopar.ir.staged_graph import Staged
from autopar.passes.recompute.recomputable import recomputable
from autopar.passes.recompute.recompute import recomputed
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.parameter_choices import parameter_choices
from autopar.placement.placed_step import trained
from autopar.plans.plan import Plan


@dataclass(frozen=True)
class ChunkNodes:
    """The chunks of a pipeline whose stages have this ``mesh``, of one kind of device: their ``graphs``, by number,
    without saved activations. What is in them is found when it is asked for, which only unequal stages do."""

    mesh: tuple[int, ...]
    graphs: Mapping[int, Graph]

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(self.graphs)

    @cached_property
    def names(self) -> frozenset[str]:
        """The nodes of all of them, those for saved activations included."""
        saving = map(SaveActivations(), self.graphs.values())
        return frozenset(node.name for graph in saving for node in graph.nodes if node.op != "receive")

    @cached_property
    def parameters(self) -> Mapping[int, frozenset[str]]:
        """By chunk, the paths of the parameters that it uses."""
        return {chunk: frozenset(graph.parameters) for chunk, graph in self.graphs.items()}


def nodes_by_mesh(plan: PlanRecord, staged: Staged) -> Iterator[ChunkNodes]:
    """The chunks of a graph that is cut as planned, by the mesh of their stages: all of them, if that is one, and
    otherwise by the kind of its devices too."""
    assert plan.pipeline is not None
    meshes = plan.stage_meshes
    devices = () if meshes.are_equal else plan.pipeline.devices
    kinds = [(meshes.meshes[stage], devices[stage : stage + 1]) for stage in plan.pipeline.schedule.placement]
    for kind in dict.fromkeys(kinds):
        yield ChunkNodes(kind[0], {chunk: staged.chunks[chunk] for chunk, own in enumerate(kinds) if own == kind})


# Strategies that a message names. Chosen: what a reader takes in.
SHOWN = 3
# What :mod:`autopar.passes.pipeline.cut` appends to the name of a copy; values that the copy saves append theirs to it.
_COPY = re.compile(r"_at\d+(_\d+)?_*(?=$|(_result\d+)?_rest$|_recomputed$)")
# And to that of a sum.
_SUM = re.compile(r"_sum_*$")


def check_offered(plan: Plan, graph: Graph, part: ChunkNodes | None = None) -> None:
    """Compares a valid ``plan`` with the annotated ``graph`` that it will run: all of it, or the ``part`` on whose mesh
    the graph is annotated.

    Raises:
        PlanMismatchError: names the node or parameter, what the plan says, and the closest choices on offer.
    """
    names = [node.name for node in graph.nodes]
    sums = _chunk_sums(plan, graph)
    copies = {name + RECOMPUTED for name in plan.recomputed} | _chunk_copies(plan, graph) | sums
    planned = (plan.nodes.keys() | plan.strategies.keys()) - copies
    # A stage with another mesh may recompute what this one saves, and the plan has what any of them has.
    elsewhere = set() if part is None else set(names) - part.names - planned
    _check_names("node", planned, [name for name in names if name not in elsewhere])
    _check_names("parameter", plan.parameters, [node.target for node in graph.placeholders("param")])
    for node in graph.placeholders("param"):
        for place in _places(plan, node, part):
            _check_parameter(place, node, graph)
    offered: dict[int, frozenset[Strategy]] = {}
    for name, strategy in plan.strategies.items():
        if part is not None and name not in part.names:
            continue
        if name in sums:
            _check_sum(name, strategy)
            continue
        node = graph[name if name in graph else original_name(name)]
        # Equal calls share one list of strategies.
        strategies = graph.strategies[node.name]
        if strategy not in offered.setdefault(id(strategies), frozenset(strategies)):
            raise PlanMismatchError(_not_offered(name, node, strategy, strategies))
    _check_recomputed(plan, graph)
    for name in plan.offloaded:
        if graph[name].op not in (SAVED_ACTIVATION, "param"):
            raise PlanMismatchError(
                f"the plan keeps {name!r} in host memory, which is no saved activation and no parameter; leave it out"
            )


def _places(plan: Plan, node: Node, part: ChunkNodes | None) -> Iterator[ParameterPlacement]:
    """How a parameter is placed, by the chunks of ``part`` that use it."""
    if part is None:
        yield plan.parameters[node.target]
        return
    assert plan.pipeline is not None
    for chunk in part.chunks:
        if node.target in part.parameters[chunk]:
            yield plan.pipeline.borrowed.get((chunk, node.target), plan.parameters[node.target])


def _chunk_copies(plan: Plan, graph: Graph) -> set[str]:
    """Copies of nodes that several chunks of a pipeline compute. A copy is named after its chunk, and placed as that
    chunk needs it."""
    if plan.pipeline is None:
        return set()
    return {name for name in plan.nodes if name not in graph and original_name(name) in graph}


def _chunk_sums(plan: Plan, graph: Graph) -> set[str]:
    """Sums that a chunk of a pipeline adds, of the parts of one gradient that it computes."""
    if plan.pipeline is None:
        return set()
    added = {name for name, node in plan.nodes.items() if name not in graph and node.op == "aten.add.Tensor"}
    return {name for name in added if _SUM.search(name)}


def _check_sum(name: str, strategy: Strategy) -> None:
    places = {*strategy.inputs, *strategy.outputs}
    if len(places) > 1 or any(isinstance(p, Partial) and p != PARTIAL_SUM for place in places for p in place):
        raise PlanMismatchError(
            f"the plan runs {name!r}, a sum of parts of a gradient, as {strategy}: parts and sum are placed alike, "
            "whole, sharded or as partial sums"
        )


def original_name(name: str) -> str:
    """The node that ``name`` copies, in another chunk or to recompute it."""
    return _COPY.sub("", name).removesuffix(RECOMPUTED)


def _check_names(kind: str, plan_names: Iterable[str], model_names: Sequence[str]) -> None:
    in_plan, in_model = set(plan_names), set(model_names)
    for name in sorted(in_plan - in_model):
        raise PlanMismatchError(
            f"the plan has a {kind} {name!r} that the model does not have{did_you_mean(name, model_names)}"
        )
    for name in sorted(in_model - in_plan):
        raise PlanMismatchError(f"the plan says nothing about the {kind} {name!r}; make a plan for this model")


def _check_parameter(place: ParameterPlacement, node: Node, graph: Graph) -> None:
    choices = parameter_choices(graph.strategies[node.name], node.target in trained(graph))
    plain = ParameterPlacement(place.weight, place.gradient, place.optimizer)
    if plain not in choices:
        near = sorted(choices, key=lambda choice: _distance(_placements(choice), _placements(plain)))[:SHOWN]
        raise PlanMismatchError(
            f"the parameter {node.target!r} cannot rest as weight, gradient and optimizer state {_describe(plain)}; "
            f"closest on offer: {' or '.join(map(_describe, near))}"
        )


def _placements(place: ParameterPlacement) -> tuple[Placements, ...]:
    return place.weight, place.gradient, place.optimizer


def _describe(place: ParameterPlacement) -> str:
    return ", ".join(map(short, _placements(place)))


def _distance(first: Sequence[Placements], second: Sequence[Placements]) -> int:
    """Counts the mesh axes on which two choices differ, over all their placements."""
    if len(first) != len(second):
        return 1 << 20
    pairs = (pair for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=False))
    return sum(a != b for a, b in pairs)


def _not_offered(name: str, node: Node, strategy: Strategy, offered: Sequence[Strategy]) -> str:
    near = sorted(offered, key=lambda candidate: _distance(candidate.places, strategy.places))[:SHOWN]
    where = f" in {node.module!r}" if node.module else ""
    return (
        f"the plan runs {name!r} ({node.op}{where}) as {strategy}, which its rule does not offer; closest on offer: "
        f"{' or '.join(map(str, near))}"
    )


def _check_recomputed(plan: Plan, graph: Graph) -> None:
    if not plan.recomputed:
        return
    possible = recomputable(graph).nodes
    for name in plan.recomputed:
        if name not in possible:
            raise PlanMismatchError(f"the plan recomputes {name!r}, which cannot be recomputed; leave it out")
    names = {node.target: node.name for node in graph.placeholders("param")}
    step, _ = recomputed(graph, plan.assignment(names))
    in_plan = plan.nodes.keys() - _chunk_copies(plan, graph) - _chunk_sums(plan, graph)
    in_step = {node.name for node in step.nodes}
    if plan.pipeline is not None:  # Chunks recompute less than the whole step does: they receive values.
        in_step -= {name for name in in_step - in_plan if name.endswith(RECOMPUTED)}
    _check_names("node", in_plan, sorted(in_step))
