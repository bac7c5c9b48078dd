"""The placement problem of one graph on one mesh: from an annotated, folded graph to arrays, and from choices back.

Each class of nodes is a group of the :class:`~autopar.problem.Problem`; its choices are the strategies of its nodes,
or, for parameters, :class:`~autopar.assignment.ParameterPlacement` s. Each value is a transfer from its producer to the
nodes that use it, one per phase. Equal groups and transfers of folded layers are one, their cost times their number.

*Recomputation.* Where it is offered, a forward operation may also choose :class:`~autopar.assignment.Again`: to run
once more in backward, at its price; a rest that does so is not kept and holds memory only while its layer is
recomputed. An operation that runs again needs its operands in backward like any backward operation: it is one more
consumer of their backward transfers, in a column of its own if it does not run again. A value that is neither kept,
nor made again, nor there anyway leaves a row from which nothing but that column can be reached.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.passes.recomputable import Recomputable

from .assignment import Again, Assignment, ParameterPlacement, travels_unseen
from .graph import REST, Graph, Node, Value
from .item_prices import (
    accumulator_bytes,
    adding_seconds,
    agreement_seconds,
    casting_seconds,
    offload_seconds,
    offloaded_bytes,
    optimizer_seconds,
    parameter_bytes,
    temporary_bytes,
)
from .late_sums import summed_late, without_sums
from .optimizers import optimizer_bytes
from .placed_step import trained
from .prices import Prices, ReshardTable, local_bytes
from .problem import Floats, Group, Ints, Problem, Transfer, Window
from .repeats import ONCE, Repeats
from .resting_places import in_host_memory, parameter_choices
from .spec import REPLICATE, Placements, Strategy
from .windows import Beside, windows_of

Choice = Strategy | ParameterPlacement
OUTPUTS = "(outputs)"


class Route(NamedTuple):
    """What transfers of folded layers have in common: result ``result`` of class ``producer`` goes, in one phase or for
    one purpose (``role``), to operands of ``consumers``."""

    producer: str
    result: int
    role: str
    consumers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class Instance:
    """``choices[i]`` of group i of ``problem``, whose node is ``names[i]``; ``again``: what may be recomputed, if
    anything; see the module docstring; ``offload``: whether optimizer state may rest in host memory; ``routes``: of the
    first transfers of ``problem`` what they are."""

    graph: Graph
    prices: Prices
    optimizer: str
    names: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    problem: Problem
    repeats: Repeats = ONCE
    again: Recomputable | None = None
    offload: bool = False
    routes: tuple[Route, ...] = ()

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    @property
    def is_wide(self) -> bool:
        """Whether there are choices that only save memory: recomputing, and optimizer state in host memory."""
        return self.again is not None or self.offload

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
            elif isinstance(choice, Again):
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
                found = again(found)
            picked.append(choices.index(found) if found is not None else 0)
        return np.array(picked, dtype=np.int64)


def again(strategy: Strategy) -> Again:
    """The choice of ``strategy`` in forward and once more in backward."""
    return Again(strategy.inputs, strategy.outputs, strategy.local)


def build_instance(
    graph: Graph,
    prices: Prices,
    *,
    optimizer: str,
    memory_limit: float,
    host_limit: float = math.inf,
    repeats: Repeats = ONCE,
    again: Recomputable | None = None,
    offload: bool = False,
    standing: Mapping[str, int] | None = None,
) -> Instance:
    """The instance of an annotated graph; without ``graph.classes`` every node is its own class. ``again`` (of the same
    graph): what may be recomputed. ``offload``: whether optimizer state may rest in host memory. Choices that recompute
    or offload stand behind those that do not, so that choices of an instance without are those of one with.
    ``standing``: nodes that stand for several, and for how many."""
    return _Builder(graph, prices, optimizer, repeats, again, offload, standing or {}).build(memory_limit, host_limit)


class _Builder:
    """Collects groups and transfers; lives only while an instance is built."""

    def __init__(
        self,
        graph: Graph,
        prices: Prices,
        optimizer: str,
        repeats: Repeats,
        again: Recomputable | None,
        offload: bool,
        standing: Mapping[str, int],
    ) -> None:
        self.graph, self.prices, self.optimizer, self.repeats = graph, prices, optimizer, repeats
        self.again, self.offload, self.standing = again, offload, standing
        self.gradients = {o.value for o in graph.outputs if o.kind == "gradient"}
        self.trained = set(trained(graph))
        self.late = summed_late(graph)
        self.results = {o.value for o in graph.outputs if o.kind in ("output", "mutation")}
        self.counts = Counter[str]()
        for node in graph.nodes:
            self.counts[self._class(node.name)] += self._often(node.name)
        self.names = (*self.counts, OUTPUTS)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.choices = tuple(self._choices(name) for name in self.names)
        read = {v.node for n in graph.nodes if n.phase == "forward" for v in n.operands}
        read |= {value.node for value in self.results if value is not None}
        read_classes = {self._class(name) for name in read}
        self.only_backward = {n for n in self.counts if graph[n].op == REST and n not in read_classes}

    def build(self, memory_limit: float, host_limit: float) -> Instance:
        groups = tuple(self._group(name, choices) for name, choices in zip(self.names, self.choices, strict=True))
        counted = self._found_routes()
        routes = tuple(counted)
        transfers = tuple(self._transfer(route, count) for route, count in counted.items())
        transfers += tuple(self._rerun(name) for name in self.counts if self._may_run_again(name))
        windows = self._windows(routes)
        problem = Problem(groups, transfers, memory_limit, windows=windows, host_limit=host_limit)
        chosen = (self.names, self.choices, problem)
        again = (self.repeats, self.again, self.offload)
        return Instance(self.graph, self.prices, self.optimizer, *chosen, *again, routes)

    def _choices(self, name: str) -> tuple[Choice, ...]:
        if name == OUTPUTS:
            return (Strategy(((REPLICATE,) * len(self.prices.mesh),), ()),)
        strategies = self.graph.strategies[name]
        if self.graph[name].op == "param":
            return self._parameter_choices(strategies, self.graph[name])
        if self._may_run_again(name):
            return (*strategies, *map(again, strategies))
        return strategies

    def _parameter_choices(self, strategies: tuple[Strategy, ...], node: Node) -> tuple[ParameterPlacement, ...]:
        is_trained = node.target in self.trained
        places = parameter_choices(strategies, is_trained)
        has_state = is_trained and optimizer_bytes(self.optimizer, node.stored)
        return (*places, *in_host_memory(places)) if self.offload and has_state else places

    def _may_run_again(self, name: str) -> bool:
        return self.again is not None and name in self.again.nodes

    def _group(self, name: str, choices: tuple[Choice, ...]) -> Group:
        if name == OUTPUTS:
            seconds = np.array([agreement_seconds(self.prices, (self.graph,))])
            return Group(name, seconds, np.zeros(1), np.zeros(1), np.zeros(1))
        count, node = self.counts[name], self.graph[name]
        rows = np.array([self._charges(node, choice) for choice in choices], dtype=np.float64)
        host = np.array([self._away(node, choice) for choice in choices], dtype=np.float64)
        return Group(name, rows[:, 0] * count, rows[:, 1] * count, rows[:, 2], host * count)

    def _away(self, node: Node, choice: Choice) -> int:
        """Bytes in the host's memory; brought to the device they are temporary."""
        if not isinstance(choice, ParameterPlacement) or node.target not in self.trained:
            return 0
        return offloaded_bytes(self.prices, node, choice, self.optimizer)

    def _charges(self, node: Node, choice: Choice) -> tuple[float, float, float]:
        """Seconds, resting bytes and temporary bytes of one node."""
        if isinstance(choice, ParameterPlacement):
            return self._parameter_charges(node, choice)
        repeats, kinds = self.repeats, tuple(self.graph.type_of(value) for value in node.operands)
        raw = float(self._accumulated(node, choice))
        if node.is_placeholder or node.op == REST:
            held = local_bytes(node.type, choice.outputs[0], self.prices.mesh)
            return 0.0, self._copies_held(node, choice) * held + raw, 0.0
        seconds = self.prices.node(node, kinds, choice) * repeats.microbatches
        seconds += adding_seconds(self.prices, node, choice, self.gradients, repeats)
        return seconds, raw, float(temporary_bytes(self.prices, node, kinds, choice))

    def _rerun(self, name: str) -> Transfer:
        """The price of the second run, apart from the first: messages are not taken to travel beside it."""
        cost = [[self._seconds_again(name, choice)] for choice in self.choices[self.index[name]]]
        rows, end = np.arange(len(cost)), np.zeros(1, dtype=np.int64)
        return Transfer(f"{name} again", self.index[name], rows, (self.index[OUTPUTS],), (end,), np.array(cost))

    def _seconds_again(self, name: str, choice: Choice) -> float:
        node = self.graph[name]
        if not isinstance(choice, Again) or node.op == REST:
            return 0.0
        kinds = tuple(self.graph.type_of(value) for value in node.operands)
        return self.prices.node(node, kinds, choice) * self.repeats.microbatches * self.counts[name]

    def _copies_held(self, node: Node, choice: Strategy) -> float:
        """How many copies of a value the device holds at once."""
        if isinstance(choice, Again) and self.again is not None:
            return self.again.shares[node.name]
        return self.repeats.in_flight if node.op == REST else 1

    def _accumulated(self, node: Node, choice: Strategy) -> int:
        """Bytes of the gradients that the node makes as partial sums, added up over microbatches."""
        made = ((Value(node.name, i), place) for i, place in enumerate(choice.outputs))
        return sum(
            accumulator_bytes(self.prices, self.graph.type_of(value), place, self.repeats)
            for value, place in made
            if value in self.gradients
        )

    def _parameter_charges(self, node: Node, place: ParameterPlacement) -> tuple[float, float, float]:
        parts = parameter_bytes(self.prices, node, place, self.optimizer)
        casting = casting_seconds(self.prices, node, place)
        if node.target not in self.trained:
            return casting, float(parts[0]), 0.0
        seconds = casting + optimizer_seconds(self.prices, node, place, self.optimizer)
        seconds += offload_seconds(self.prices, node, place, self.optimizer)
        if place.weight != place.optimizer:
            seconds += self.prices.table(node.type, bucketed=True).cost(place.optimizer, place.weight)
        return seconds, float(sum(parts)), float(self._away(node, place))

    def _windows(self, routes: tuple[Route, ...]) -> tuple[Window, ...]:
        found = windows_of(self.graph, self.prices.cluster, self.repeats)
        return tuple(self._window(window, routes) for window in found)

    def _window(self, window: Beside, routes: tuple[Route, ...]) -> Window:
        """Groups and gathers cost what they do in all microbatches, reductions once."""
        part = window.times / self.repeats.microbatches
        computes = (i for i, name in enumerate(self.names) if self._computes(name, window.phase))
        gathers = (i for i, route in enumerate(routes) if self._gathers(route, window.phase))
        reductions = (i for i, route in enumerate(routes) if window.reduces and route.role == "gradient")
        transfers = dict.fromkeys(gathers, part) | dict.fromkeys(reductions, 1.0)
        return Window(window.name, dict.fromkeys(computes, part), transfers, window.hidden)

    def _computes(self, name: str, phase: str) -> bool:
        if name == OUTPUTS:
            return False
        node = self.graph[name]
        return node.phase == phase and not node.is_placeholder and node.op != REST

    def _gathers(self, route: Route, phase: str) -> bool:
        return route.role == phase and self.graph[route.producer].op == "param"

    def _found_routes(self) -> Counter[Route]:
        found: Counter[Route] = Counter()
        for node in self.graph.nodes:
            for index, kind in enumerate(node.types):
                if kind is not None:
                    found.update(self._routes(Value(node.name, index)))
        for output in self.graph.outputs:
            if output.value is not None and output.kind in ("gradient", "input_gradient"):
                found[self._gradient_route(output.kind, output.name, output.value)] += self._often(output.value.node)
        return found

    def _class(self, node: str) -> str:
        return self.graph.classes.get(node, node)

    def _often(self, node: str) -> int:
        return self.standing.get(node, 1)

    def _routes(self, value: Value) -> Mapping[Route, int]:
        """How often there is a route, one for each phase the value is used in. To be a result of the model is a use;
        what may run again may use it in backward."""
        by_phase: dict[str, dict[tuple[str, int], None]] = {}
        often = Counter[str]()
        for user, operand in self.graph.users.get(value, ()):
            often[user.phase] = max(often[user.phase], self._often(user.name))
            by_phase.setdefault(user.phase, {})[self._class(user.name), operand] = None
            if user.phase == "forward" and self._may_run_again(self._class(user.name)):
                by_phase.setdefault("backward", {})[self._class(user.name), operand] = None
        if value in self.results:
            by_phase.setdefault(self.graph[value.node].phase, {})[OUTPUTS, 0] = None
        producer = self._class(value.node)
        return {Route(producer, value.index, p, tuple(found)): max(1, often[p]) for p, found in by_phase.items()}

    def _gradient_route(self, kind: str, name: str, value: Value) -> Route:
        producer = self._class(value.node)
        if kind == "input_gradient":
            return Route(producer, value.index, "gradient", ((OUTPUTS, 0),))
        parameter = self.graph.parameters[name].name
        return Route(producer, value.index, "gradient", ((self._class(parameter), -1),))

    def _transfer(self, route: Route, count: int) -> Transfer:
        producer, result, role, consumers = route
        kind = self.graph.type_of(Value(producer, result))
        table = self.prices.table(kind, bucketed=role == "gradient")
        rows = [self._row(producer, choice, result, role) for choice in self.choices[self.index[producer]]]
        needs = [
            [self._column(name, choice, operand, role) for choice in self.choices[self.index[name]]]
            for name, operand in consumers
        ]
        row_places, column_places = list(dict.fromkeys(rows)), list(dict.fromkeys(p for n in needs for p in n))
        often = 1 if role == "gradient" else self.repeats.microbatches
        cost = count * often * _submatrix(table, row_places, column_places)
        if role != "gradient" and travels_unseen(self.graph, Value(producer, result)):
            cost = np.where(np.isfinite(cost), 0.0, cost)
        if Value(producer, result) in self.late:
            cost = without_sums(cost, row_places, column_places)
        return Transfer(
            f"{producer}.{result} {role}",
            self.index[producer],
            _positions(rows, row_places),
            tuple(self.index[name] for name, _ in consumers),
            tuple(_positions(need, column_places) for need in needs),
            cost,
        )

    def _row(self, producer: str, choice: Choice, result: int, role: str) -> Placements | None:
        """How a value lies at its source; None if backward asks for it and it is not there."""
        node = self.graph[producer]
        gone = role == "backward" and node.phase == "forward" and not node.is_placeholder and node.op != REST
        return None if gone and not isinstance(choice, Again) else result_place(choice, result)

    def _column(self, consumer: str, choice: Choice, operand: int, role: str) -> Placements | None:
        """How a consumer needs a value; None if it does not: in backward, because it ran in forward only, or in
        forward, because it is a rest for backward alone that is not kept."""
        forward = consumer != OUTPUTS and self.graph[consumer].phase == "forward"
        unneeded = role == "forward" and forward and isinstance(choice, Again) and consumer in self.only_backward
        repeated = role == "backward" and forward and not isinstance(choice, Again)
        return None if unneeded or repeated else operand_place(choice, operand)


def result_place(choice: Choice, result: int) -> Placements:
    return choice.weight if isinstance(choice, ParameterPlacement) else choice.outputs[result]


def operand_place(choice: Choice, operand: int) -> Placements:
    return choice.gradient if isinstance(choice, ParameterPlacement) else choice.inputs[operand]


def _positions(places: list[Placements | None], among: list[Placements | None]) -> Ints:
    index = {place: i for i, place in enumerate(among)}
    return np.array([index[place] for place in places], dtype=np.int64)


def _submatrix(table: ReshardTable, rows: list[Placements | None], columns: list[Placements | None]) -> Floats:
    """Seconds from rows to columns; to need nothing is free, what is not there cannot be had."""
    found = np.full((len(rows), len(columns)), np.inf)
    found[:, [column is None for column in columns]] = 0.0
    there, needed = ([i for i, place in enumerate(places) if place is not None] for places in (rows, columns))
    starts, ends = ([table.index[place] for place in places if place is not None] for places in (rows, columns))
    found[np.ix_(there, needed)] = table.seconds[np.ix_(starts, ends)]
    return found
