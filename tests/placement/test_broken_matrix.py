"""The matrix of what reshards inside of kernels add is what prices say of each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopar.cluster.description import Cluster
from autopar.ir.node import TensorType
from autopar.ir.placements import parse_placements
from autopar.ir.reshard import neighbours
from autopar.placement.edge_costs import broken_matrix
from autopar.placement.prices import Prices

PLACES = [None, *map(parse_placements, ("R,R", "S(0),R", "R,S(0)", "S(0),S(1)", "P,R", "S(1),S(1)"))]


@pytest.mark.parametrize("shape", [(8, 12), (7, 9)])
def test_the_matrix_is_what_prices_say(shape: tuple[int, int]) -> None:
    kind, mesh = TensorType(shape, torch.bfloat16), (2, 3)
    prices = Prices(Cluster.get("dgx-a100-80gb"), mesh, {}, 1)
    sources, targets = PLACES[:5], PLACES[::-1]
    expected = np.array(
        [
            [0.0 if None in (a, b) or a == b else prices.broken(kind, a, b) for b in targets]  # type: ignore[arg-type]
            for a in sources
        ]
    )
    assert (broken_matrix(prices, kind, sources, targets) == expected).all()
    assert (expected > 0).sum() > 15


@pytest.mark.parametrize("mesh", [(2, 3), (4,), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(8, 12), (7, 9)])
def test_hops_among_known_placements_are_those_that_are_found(shape: tuple[int, int], mesh: tuple[int, ...]) -> None:
    kind = TensorType(shape, torch.float32)
    options = tuple(parse_placements("R,P,S(0),S(1),S(0/2)")[:5] for _ in mesh)
    cluster = Cluster.get("dgx-a100-80gb")
    prices = [Prices(cluster, mesh, {kind: options}, 1) for _ in range(2)]
    first, second = prices[0].table(kind), prices[1].table(kind, sent="bucketed")
    assert first.hops == second.hops == prices[0].table(kind, sent="bucketed").hops and first.hops
    states = set(first.states)
    for i, state in enumerate(first.states):
        found = [hop for hop in neighbours(kind, state, options, mesh) if hop.target in states]
        assert found == [hop for (start, _), hop in first.hops.items() if start == i]
    assert (second.seconds == prices[0].table(kind, sent="bucketed").seconds).all()
