"""The bound of a problem in which copies choose alike holds for assignments in which each chooses by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from autopar.solver.budget import Budget
from autopar.solver.problem import Floats, Group, Ints, Problem, Transfer
from autopar.solver.solve import solve
from autopar.solver.untied_dual import Copies, End, Kind, untied_bound
from tests.helpers.marks import slow_but

CHOICES, PLENTY = 3, 1e9


@dataclass(frozen=True)
class Stack:
    """``layers`` of two nodes, the first of which reads what an entrance or the layer before gives, and perhaps what
    all layers share; an exit reads the last. ``apart``: the problem in which every node chooses by itself; ``alike``:
    that in which layers choose alike."""

    alike: Problem
    apart: Problem
    copies: Copies

    @staticmethod
    def at_random(draw: np.random.Generator, layers: int) -> Stack:
        entrance, first, second, leave, shared = range(5)
        groups = [_group(draw, name) for name in ("entrance", "first", "second", "exit", "shared")]
        counts = [1, layers, layers, 1, 1]
        # The node of layer l, or the one node, by group.
        place = {entrance: [0], leave: [1], shared: [2], first: [], second: []}
        for layer in range(layers):
            place[first].append(3 + 2 * layer)
            place[second].append(4 + 2 * layer)
        # Each transfer: from what group to which others, and its copies as nodes.
        wanted: list[tuple[int, tuple[int, ...], list[tuple[int, tuple[tuple[int, ...], ...]]]]] = []

        def joins(producer: int, consumers: tuple[int, ...], copies: list[tuple[int, list[list[int]]]]) -> None:
            wanted.append((producer, consumers, [(p, tuple(map(tuple, c))) for p, c in copies]))

        f, s = place[first], place[second]
        joins(first, (second,), [(f[i], [[s[i]]]) for i in range(layers)])
        joins(entrance, (first, second), [(0, [[f[0]], [s[0]]])])
        joins(second, (first, second), [(s[i], [[f[i + 1]], [s[i + 1]]]) for i in range(layers - 1)])
        joins(second, (leave,), [(s[-1], [[1]])])
        joins(shared, (first, second), [(2, [f, s])])  # All layers read it; it is sent once.
        if draw.random() < 0.5:  # A kind of edge whose copies have different numbers of readers.
            joins(second, (second,), [(s[i], [s[i + 1 :]]) for i in range(layers - 1)])
        prices = [_price(draw) for _ in wanted]
        order = {node: (group, layer) for group, nodes in place.items() for layer, node in enumerate(nodes)}
        apart_groups = tuple(groups[order[node][0]] for node in range(len(order)))
        transfers, together = [], []
        ends: dict[int, list[End]] = {node: [] for node in order}
        totals: dict[End, int] = {}
        loose = set()
        for t, ((producer, consumers, copies), (source, targets, cost)) in enumerate(zip(wanted, prices, strict=True)):
            labels = targets[: len(consumers)]
            together.append(Transfer("", producer, source, consumers, labels, len(copies) * cost))
            for node, readers in copies:
                flat = [(own, labels[c]) for c, nodes in enumerate(readers) for own in nodes]
                transfers.append(
                    Transfer("", node, source, tuple(n for n, _ in flat), tuple(own for _, own in flat), cost)
                )
                for c, nodes in enumerate(readers):
                    for own, is_producer in ((node, True), *((n, False) for n in nodes)):
                        ends[own].append((t, c, is_producer))
                        totals[t, c, is_producer] = totals.get((t, c, is_producer), 0) + 1
            loose |= {(t, c) for c in range(len(consumers)) if len({len(readers[c]) for _, readers in copies}) > 1}
        kinds = []
        for group, nodes in sorted(place.items()):
            alike: dict[tuple[End, ...], int] = {}
            for node in nodes:
                alike[tuple(sorted(ends[node]))] = alike.get(tuple(sorted(ends[node])), 0) + 1
            for own, count in alike.items():
                weights = {end: count * own.count(end) / totals[end] for end in own}
                kinds.append(Kind(group, count / counts[group], weights))
        scaled = tuple(replace(g, cost=n * g.cost, memory=n * g.memory) for g, n in zip(groups, counts, strict=True))
        times = tuple(len(copies) for _, _, copies in wanted)
        return Stack(
            Problem(scaled, tuple(together)),
            Problem(apart_groups, tuple(transfers)),
            Copies(tuple(kinds), times, frozenset(loose)),
        )


def _group(draw: np.random.Generator, name: str) -> Group:
    cost, memory, none = draw.integers(0, 10, CHOICES) * 1.0, draw.integers(0, 10, CHOICES) * 1.0, np.zeros(CHOICES)
    if draw.random() < 0.3:
        cost[draw.integers(CHOICES)] = np.inf
    return Group(name, cost, memory, none, none)


def _price(draw: np.random.Generator) -> tuple[Ints, tuple[Ints, ...], Floats]:
    cost = draw.integers(0, 12, (2, 3)) * 1.0
    if draw.random() < 0.4:
        cost[draw.integers(2), draw.integers(3)] = np.inf
    return draw.integers(0, 2, CHOICES), tuple(draw.integers(0, 3, CHOICES) for _ in range(2)), cost


@pytest.mark.parametrize("seed", slow_but(range(4), range(12)))
def test_no_assignment_costs_less(seed: int) -> None:
    draw = np.random.default_rng(seed)
    stack = Stack.at_random(draw, layers=2 + seed % 4)
    most = sum(float(group.memory.max()) for group in stack.apart.groups)
    for part in (0.1, 0.3, 0.5, 0.7, 1.0):
        best = solve(replace(stack.apart, memory_limit=part * most), gap=0.0, counted=True)
        alike = replace(stack.alike, memory_limit=part * most)
        for price in (0.0, 0.5, 3.0):
            bound = untied_bound(alike, stack.copies, enough=PLENTY, budget=Budget(0.1, True), first_price=price)
            assert bound <= best.objective + 1e-6


def test_it_is_near_the_best_where_copies_choose_differently() -> None:
    """Ten copies, of which nine fit that hold much and are quick: alike, none may."""
    nothing = np.zeros(2)
    alike = Problem((Group("each", np.array([10.0, 100.0]), np.array([10.0, 0.0]), nothing, nothing),), ())
    copies = Copies((Kind(0, 1.0, {}),), ())
    limited = replace(alike, memory_limit=9.0)
    assert solve(limited).objective == 100.0
    assert untied_bound(limited, copies, enough=PLENTY, budget=Budget(0.1, True)) == pytest.approx(9 * 1.0 + 10.0)
