"""Gossip against replicas in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar import Gossip
from autopar.runtime.averaging.topology import round_of
from autopar.sync import TOPOLOGIES
from tests.runtime.averaging.training import Exchange, assert_same, batches, simulated, trained


def matrix(topology: str, count: int, number: int, seed: int = 0) -> torch.Tensor:
    """The weights of a round: row i makes replica i's parameters of everyone's."""
    weights = torch.zeros(count, count, dtype=torch.float64)
    for index in range(count):
        mixing = round_of(topology, index, count, number, seed)
        weights[index, index] += mixing.own
        for peer, weight in mixing.receives:
            weights[index, peer] += weight
    return weights


def mixed(every: int, weights_of: Any) -> Exchange:
    def exchange(models: list[nn.Module], step: int) -> None:
        if step % every:
            return
        weights = weights_of(len(models), step // every - 1)
        for group in zip(*(model.parameters() for model in models), strict=True):
            result = torch.tensordot(weights, torch.stack(list(group)), 1)
            for parameter, value in zip(group, result, strict=True):
                parameter.copy_(value)

    return exchange


def ring(count: int, _number: int) -> torch.Tensor:
    if count == 2:
        return torch.full((2, 2), 0.5, dtype=torch.float64)
    rows = torch.eye(count, dtype=torch.float64)
    return (rows + rows.roll(1, 0) + rows.roll(-1, 0)) / 3


def exponential(count: int, number: int) -> torch.Tensor:
    rows = torch.eye(count, dtype=torch.float64)
    return (rows + rows.roll(2 ** (number % math.ceil(math.log2(count))), 0)) / 2


REFERENCES = {"ring": ring, "exponential": exponential}


@pytest.mark.parametrize(
    "topology, every, mesh, options",
    [
        ("ring", 1, (2,), {}),
        pytest.param("ring", 1, (4,), {}, marks=pytest.mark.slow),
        pytest.param("exponential", 2, (4,), {}, marks=pytest.mark.slow),
        pytest.param("ring", 2, (2, 2), {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("exponential", 1, (2, 2), {"stages": 2, "microbatches": 1}, marks=pytest.mark.slow),
    ],
)
def test_replicas_mix_with_neighbours(
    topology: Any, every: int, mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    found = trained(Gossip(topology, every=every), mesh, data := batches(7, rows=2 * mesh[0] + 3), **options)
    assert_same(found, simulated(mixed(every, REFERENCES[topology]), mesh[0], data))


@pytest.mark.slow
def test_random_pairs_are_those_of_the_rounds() -> None:
    found = trained(Gossip("random", seed=5), (4,), data := batches(6, rows=8))
    assert_same(found, simulated(mixed(1, lambda n, k: matrix("random", n, k, 5)), 4, data))


@given(st.sampled_from(TOPOLOGIES), st.integers(1, 17), st.integers(0, 40), st.integers(0, 3))
def test_rounds_keep_the_mean_and_agree_on_who_sends(topology: str, count: int, number: int, seed: int) -> None:
    weights = matrix(topology, count, number, seed)
    ones = torch.ones(count, dtype=torch.float64)
    torch.testing.assert_close(weights.sum(0), ones)
    torch.testing.assert_close(weights.sum(1), ones)
    rounds = [round_of(topology, index, count, number, seed) for index in range(count)]
    sent = {(index, peer) for index, each in enumerate(rounds) for peer in each.sends}
    received = {(peer, index) for index, each in enumerate(rounds) for peer, _ in each.receives}
    assert sent == received and all(index != peer for index, peer in sent)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_exponential_rounds_end_in_the_exact_mean(count: int) -> None:
    product = torch.eye(count, dtype=torch.float64)
    for number in range(int(math.log2(count))):
        product = matrix("exponential", count, number) @ product
    torch.testing.assert_close(product, torch.full((count, count), 1 / count, dtype=torch.float64))


def test_random_pairs_differ_between_rounds_and_leave_one_of_an_odd_number() -> None:
    rounds = [matrix("random", 7, number) for number in range(20)]
    assert len({tuple(each.flatten().tolist()) for each in rounds}) > 10
    assert all((each.diagonal() == 1).sum() == 1 for each in rounds)
