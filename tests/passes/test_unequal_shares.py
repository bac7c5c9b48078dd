"""Rows in unequal shares: whatever is chosen among them computes what one device computes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.placements import Shares, Strategy, shares_of
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.collectives_read_back import collectives_of, difference
from autopar.placement.breakdown import cost_breakdown
from autopar.placement.placed_step import PlacedStep
from tests.planner.test_uneven import case
from tests.zoo.check import Case, check_assignment, make_case, prices_for, programs, random_assignment

MESHES: list[tuple[int, tuple[int, ...], Shares]] = [
    (5, (2,), ((1, 4),)),
    (4, (3,), ((1, 2, 1),)),
    (9, (4,), ((4, 1, 1, 3),)),
    (8, (2, 2), ((3, 1), ())),
    (8, (2, 2), ((), (3, 1))),
]


class Coupled(nn.Module):
    """Batch statistics, dropout, and a mean over labels of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.norm(self.first(x))), 0.3)
        return F.cross_entropy(self.last(x), labels)


def coupled(rows: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (rows,), generator=generator)
    labels[1] = -100
    return make_case(Coupled(), (torch.randn(rows, 6, generator=generator), labels))


def mostly_unequal(generator: random.Random, offered: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Those that divide in unequal shares, most of the time that there are any."""
    unequal = tuple(s for s in offered if any(shares_of(p) for places in s.places for p in places))
    return unequal if unequal and generator.random() < 0.7 else offered


def divided(graph: Graph, mesh: tuple[int, ...], seed: int) -> Assignment:
    """A random assignment in which most nodes that can be are divided in unequal shares."""
    return random_assignment(graph, mesh, seed, mostly_unequal)


def check(one: Case, mesh: tuple[int, ...], shares: Shares, seed: int) -> None:
    annotated = annotate(one.graph, mesh, shares)
    prices, assignment = prices_for(annotated, mesh), divided(annotated, mesh, seed)
    assert prices.shares == shares
    check_assignment(one, annotated, assignment, prices, f"mesh {mesh} in {shares}, seed {seed}")
    step = PlacedStep(annotated, assignment, prices, "adamw")
    priced = Counter(wire for line in cost_breakdown(step).lines for wire in line.collectives)
    fullest = programs(annotated, assignment, prices)[list(product(*map(range, mesh))).index(prices.fullest)]
    assert difference(collectives_of(fullest), priced) == ()


@pytest.mark.parametrize(("rows", "mesh", "shares"), MESHES)
def test_any_assignment_is_right(rows: int, mesh: tuple[int, ...], shares: Shares) -> None:
    check(case(rows), mesh, shares, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize(("rows", "mesh", "shares"), MESHES)
def test_many_assignments_are_right(rows: int, mesh: tuple[int, ...], shares: Shares, seed: int) -> None:
    check(case(rows), mesh, shares, seed)


@pytest.mark.parametrize("seed", range(2))
def test_batch_statistics_dropout_and_ignored_labels(seed: int) -> None:
    check(coupled(7), (2,), ((5, 2),), seed)


def test_rows_that_shares_do_not_divide_are_shared_anew() -> None:
    for rows, found in ((8, {(3, 1)}), (6, {(5, 1)}), (2, {(1, 1)}), (1, set())):
        annotated = annotate(case(rows).graph, (2,), ((3, 1),))
        shares = {shares_of(p) for n in annotated.nodes for s in annotated.strategies[n.name] for (p,) in s.places}
        assert shares - {()} == found


def test_parameters_are_never_in_unequal_shares() -> None:
    annotated = annotate(case(8).graph, (2,), ((3, 1),))
    placed = [p for n in annotated.placeholders("param") for s in annotated.strategies[n.name] for (p,) in s.outputs]
    assert not any(map(shares_of, placed))
