"""The placement problem of one graph on one mesh: from an annotated, folded graph to arrays, and from choices back.

Each class of nodes is a group of the :class:`~autopar.solver.problem.Problem`; its choices are the strategies of its
nodes, or, for parameters, :class:`~autopar.ir.assignment.ParameterPlacement` s. Each value is a transfer from its
producer to the nodes that use it, one per phase. Equal groups and transfers of folded layers are one, their cost
times their number.

*Recomputation.* Where it is offered, a forward operation may also choose :class:`~autopar.ir.assignment.Recomputed`: to
run once more in backward, at its price; a rest that does so is not kept and holds memory only while its layer is
recomputed. An operation that runs again needs its operands in backward like any backward operation: it is one more
consumer of their backward transfers, in a column of its own if it does not run again. A value that is neither kept,
nor made again, nor there anyway leaves a row from which nothing but that column can be reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.ir.assignment import Assignment, ParameterPlacement, Recomputed
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats
from autopar.ir.placements import Strategy
from autopar.passes.recompute.recomputable import Recomputable
from autopar.solver.problem import Ints, Problem

from .choice_costs import ChoiceCosts
from .choices import Choice, ChoiceSets, recomputed_strategy
from .edge_costs import Transfers
from .edges import TensorEdge, find_edges
from .formulation_windows import instance_windows
from .prices import Prices


@dataclass(frozen=True, eq=False)
class Instance:
    """``choices[i]`` of group i of ``problem``, whose node is ``names[i]``; ``recomputable``: what may be recomputed,
    if anything; see the module docstring; ``offload``: whether optimizer state may rest in host memory; ``edges``: of
    the first transfers of ``problem`` what they are."""

    graph: Graph
    prices: Prices
    optimizer: str
    names: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    problem: Problem
    repeats: Repeats = ONCE
    recomputable: Recomputable | None = None
    offload: bool = False
    edges: tuple[TensorEdge, ...] = ()

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @property
    def is_wide(self) -> bool:
        """Whether there are choices that only save memory: recomputing, and optimizer state in host memory."""
        return self.recomputable is not None or self.offload

    def group_of(self, node: str) -> int:
        return self.index[self.graph.classes.get(node, node)]

    def assignment(self, chosen: Ints) -> Assignment:
        """The choices unfolded: every node takes that of its class."""
        strategies: dict[str, Strategy] = {}
        parameters: dict[str, ParameterPlacement] = {}
        recomputed: set[str] = set()
        for node in self.graph.nodes:
            group = self.group_of(node.name)
            choice = self.choices[group][int(chosen[group])]
            if isinstance(choice, ParameterPlacement):
                parameters[node.name] = choice
            elif isinstance(choice, Recomputed):
                strategies[node.name] = choice.plain
                recomputed.add(node.name)
            else:
                strategies[node.name] = choice
        return Assignment(self.prices.mesh, strategies, parameters, recomputed=frozenset(recomputed))

    def chosen(self, assignment: Assignment) -> Ints:
        """The inverse of :meth:`assignment`."""
        picked = []
        for name, choices in zip(self.names, self.choices, strict=True):
            found = assignment.parameters.get(name) or assignment.strategies.get(name)
            if name in assignment.recomputed and isinstance(found, Strategy):
                found = recomputed_strategy(found)
            picked.append(choices.index(found) if found is not None else 0)
        return np.array(picked, dtype=np.int64)


def build_instance(
    graph: Graph,
    prices: Prices,
    *,
    optimizer: str,
    memory_limit: float,
    host_limit: float = math.inf,
    repeats: Repeats = ONCE,
    recomputable: Recomputable | None = None,
    offload: bool = False,
    multiplicity: Mapping[str, int] | None = None,
) -> Instance:
    """The instance of an annotated graph; without ``graph.classes`` every node is its own class. ``recomputable`` (of
    the same graph): what may be recomputed. ``offload``: whether optimizer state may rest in host memory. Choices that
    recompute or offload stand behind those that do not, so that choices of an instance without are those of one with.
    ``multiplicity``: nodes that represent several, and for how many."""
    choice_sets = ChoiceSets(graph, prices, optimizer, repeats, recomputable, offload, multiplicity or {})
    costs, transfers, counted = ChoiceCosts(choice_sets), Transfers(choice_sets), find_edges(choice_sets)
    edges = tuple(counted)
    moves = [transfers.of(edge, count) for edge, count in counted.items()]
    moves += [costs.rerun(name) for name in choice_sets.counts if choice_sets.may_run_again(name)]
    problem = Problem(
        tuple(map(costs.group, choice_sets.choices)),
        tuple(moves),
        memory_limit,
        windows=instance_windows(choice_sets, edges),
        host_limit=host_limit,
    )
    return Instance(
        graph,
        prices,
        optimizer,
        names=tuple(choice_sets.choices),
        choices=tuple(choice_sets.choices.values()),
        problem=problem,
        repeats=repeats,
        recomputable=recomputable,
        offload=offload,
        edges=edges,
    )
