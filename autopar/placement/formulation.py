"""The placement problem of one graph on one mesh: from an annotated, folded graph to arrays, and from choices back.

Each class of nodes is a group of the :class:`~autopar.solver.problem.Problem`. Its choices are the strategies of its
nodes or, for parameters, :class:`~autopar.ir.assignment.ParameterPlacement` s. Each value is a transfer from its
producer to the nodes that use it, one per phase. Equal groups and transfers of folded layers are merged into one, whose
cost is multiplied by their number.

*Recomputation.* Where it is offered, a forward operation may also choose :class:`~autopar.ir.assignment.Recomputed`: to
run again in backward, at its price. A saved activation that chooses it is not kept, and holds memory only while its
layer is recomputed. A recomputed operation needs its operands in backward like any backward operation, so it is another
consumer of their backward transfers; an operation that is not recomputed uses a column of its own there, which needs
nothing. A value that is neither kept, nor recomputed, nor available anyway has a row of its own, from which only that
column can be reached.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.ir.assignment import Assignment, Offloaded, ParameterPlacement, Recomputed, WeightInHost
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats
from autopar.ir.node import SAVED_ACTIVATION
from autopar.ir.placements import Strategy
from autopar.offload import Destination
from autopar.passes.recompute.recomputable import Recomputable
from autopar.solver.problem import Ints, Problem
from autopar.solver.untied_dual import Copies, End, Kind

from .choice_costs import ChoiceCosts
from .choices import OUTPUTS, Choice, ChoiceSets, offloaded_strategy, recomputed_strategy
from .edge_costs import Transfers, consumers_inside
from .edges import EdgeCopy, TensorEdge, edge_copies, find_edges
from .formulation_windows import instance_windows
from .parameter_choices import with_weight_in_host
from .prices import Prices


@dataclass(frozen=True, eq=False)
class Instance:
    """A placement program, and what its groups and choices mean. Group i of ``problem`` is that of the node
    ``names[i]`` and has ``choices[i]``. ``recomputable``: the nodes that may be recomputed, if any; see the module
    docstring. ``offload``: what may rest outside of the device's memory. ``edges``: the tensor edges of the first
    transfers of ``problem``."""

    graph: Graph
    prices: Prices
    optimizer: str
    names: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    problem: Problem
    repeats: Repeats = ONCE
    recomputable: Recomputable | None = None
    offload: frozenset[Destination] = frozenset()
    edges: tuple[TensorEdge, ...] = ()

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @property
    def is_wide(self) -> bool:
        """Whether there are choices that only save memory: recomputation, and other tiers of memory."""
        return self.recomputable is not None or bool(self.offload)

    def group_of(self, node: str) -> int:
        return self.index[self.graph.classes.get(node, node)]

    def assignment(self, chosen: Ints) -> Assignment:
        """The assignment of the unfolded graph: every node takes the choice of its class."""
        taken = {name: own[index] for name, own, index in zip(self.names, self.choices, chosen.tolist(), strict=True)}
        plain = {name: self._plain(group, choice) for group, (name, choice) in enumerate(taken.items())}
        classes = self.graph.classes
        of_node = [(node.name, classes.get(node.name, node.name)) for node in self.graph.nodes]
        places = {name: place for name, place in plain.items() if isinstance(place, ParameterPlacement)}
        again = {name for name, choice in taken.items() if isinstance(choice, Recomputed)}
        away = {name for name, choice in taken.items() if isinstance(choice, (Offloaded, WeightInHost))}
        return Assignment(
            self.prices.mesh,
            {name: plain[own] for name, own in of_node if own not in places},  # type: ignore[misc]
            {name: places[own] for name, own in of_node if own in places},
            recomputed=frozenset([name for name, own in of_node if own in again] if again else ()),
            offloaded=frozenset([name for name, own in of_node if own in away] if away else ()),
        )

    def _plain(self, group: int, choice: Choice) -> Choice:
        """What ``choice`` of a group means for the placements alone: one object for all nodes, by whose identity prices
        are kept (:meth:`.Prices.of_call`)."""
        if not isinstance(choice, (Recomputed, Offloaded, WeightInHost)):
            return choice
        key = group, id(choice)
        if key not in self._known:
            plain = choice.plain
            self._known[key] = next((own for own in self.choices[group] if own == plain), plain)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int], Choice]:
        return {}

    def chosen(self, assignment: Assignment) -> Ints:
        """The inverse of :meth:`assignment`."""
        picked = []
        for name, choices in zip(self.names, self.choices, strict=True):
            choice = assignment.parameters.get(name) or assignment.strategies.get(name)
            if name in assignment.recomputed and isinstance(choice, Strategy):
                choice = recomputed_strategy(choice)
            if name in assignment.offloaded and isinstance(choice, Strategy):
                choice = offloaded_strategy(choice)
            if name in assignment.offloaded and isinstance(choice, ParameterPlacement):
                (choice,) = with_weight_in_host((choice,))
            picked.append(choices.index(choice) if choice is not None else 0)
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
    offload: frozenset[Destination] = frozenset(),
    multiplicity: Mapping[str, int] | None = None,
) -> Instance:
    """The instance of an annotated graph. Without ``graph.classes`` every node is its own class. ``recomputable`` (of
    the same graph): the nodes that may be recomputed. ``offload``: what may rest outside of the device's memory. In the
    list of a group, choices that recompute or offload follow those that do not, so choices of an instance without them
    are valid in one with them. ``multiplicity``: for nodes that represent several nodes, how many."""
    choice_sets = ChoiceSets(graph, prices, optimizer, repeats, recomputable, offload, multiplicity or {})
    costs, transfers, counted = ChoiceCosts(choice_sets), Transfers(choice_sets), find_edges(choice_sets)
    edges = tuple(counted)
    moves = [transfers.of(edge, count) for edge, count in counted.items()]
    moves += transfers.broken(counted)
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


def copies_of(instance: Instance) -> Copies:
    """The nodes of which each group of ``instance`` consists, as copies of each other."""
    own = instance.optimizer, instance.repeats, instance.recomputable, instance.offload
    choice_sets = ChoiceSets(instance.graph, instance.prices, *own)
    times, totals = Counter[int](), Counter[End]()
    sizes, incidences = defaultdict[tuple[int, int], set[int]](set), defaultdict[str, list[End]](list)
    for transfer, producer, consumers in _transfer_copies(instance, choice_sets):
        times[transfer] += 1
        for position, nodes in enumerate(consumers):
            sizes[transfer, position].add(len(nodes))
            totals[transfer, position, True] += 1
            totals[transfer, position, False] += len(nodes)
            incidences[producer].append((transfer, position, True))
            for node in nodes:
                incidences[node].append((transfer, position, False))
    kinds = list[Kind]()
    for group, nodes in _nodes_of_groups(instance):
        for ends, count in Counter(tuple(sorted(incidences[node])) for node in nodes).items():
            weights = {end: count * often / totals[end] for end, often in Counter(ends).items()}
            kinds.append(Kind(group, count / len(nodes), weights))
    loose = {slot for slot, counts in sizes.items() if len(counts) > 1} | set(_partly_read(instance, choice_sets))
    return Copies(tuple(kinds), tuple(times[t] for t in range(len(instance.problem.transfers))), frozenset(loose))


def _nodes_of_groups(instance: Instance) -> Iterator[tuple[int, Sequence[str]]]:
    """The nodes of each group, by its position."""
    nodes = defaultdict[str, list[str]](list)
    for node in instance.graph.nodes:
        nodes[instance.graph.classes.get(node.name, node.name)].append(node.name)
    for group, name in enumerate(instance.names):
        yield group, nodes[name] or (name,)


def _transfer_copies(instance: Instance, choice_sets: ChoiceSets) -> Iterator[tuple[int, str, Sequence[Sequence[str]]]]:
    """The transfers of the nodes, in the place of those of :func:`build_instance`: which, from what node, and to what
    nodes of each consumer."""
    index, fused = {edge: i for i, edge in enumerate(instance.edges)}, instance.prices.fused
    inside = {edge: consumers_inside(edge, fused) for edge in instance.edges}
    broken = [edge for edge, consumers in inside.items() if consumers and consumers != edge.consumers]
    after = {edge: len(index) + i for i, edge in enumerate(broken)}
    for copy in edge_copies(choice_sets):
        yield index[copy.edge], copy.producer, copy.consumers
        if copy.edge in after:
            yield after[copy.edge], copy.producer, _readers_inside(copy, inside[copy.edge])
    again = [name for name in choice_sets.counts if choice_sets.may_run_again(name)]
    rerun = {name: len(index) + len(after) + i for i, name in enumerate(again)}
    for node in instance.graph.nodes:
        name = choice_sets.class_of(node.name)
        if name in rerun:
            yield rerun[name], node.name, ((OUTPUTS,),)


def _readers_inside(copy: EdgeCopy, inside: Sequence[tuple[str, int]]) -> Sequence[Sequence[str]]:
    return [copy.consumers[copy.edge.consumers.index(consumer)] for consumer in inside]


def _partly_read(instance: Instance, choice_sets: ChoiceSets) -> Iterator[tuple[int, int]]:
    """The consumers of transfers in forward that are saved activations of which forward reads some copies: what these
    need, the others may not."""
    graph = instance.graph
    read = {value.node for node in graph.nodes if node.phase == "forward" for value in node.operands}
    read |= {value.node for value in choice_sets.results if value is not None}
    found = defaultdict[str, set[bool]](set)
    for node in graph.nodes:
        if node.op == SAVED_ACTIVATION:
            found[choice_sets.class_of(node.name)].add(node.name in read)
    partly = {name for name, answers in found.items() if len(answers) > 1}
    for i, edge in enumerate(instance.edges):
        if edge.role == "forward":
            yield from ((i, c) for c, (name, _) in enumerate(edge.consumers) if name in partly)
