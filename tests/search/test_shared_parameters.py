"""A parameter that several chunks use is stored and updated once, and what it takes to borrow it is on the cost
breakdown."""

from __future__ import annotations

import pytest

from autopar.cluster.description import Cluster
from autopar.cost.collective.point_to_point import message_rate
from autopar.plans.plan import Plan
from tests.helpers.planning import CLUSTER
from tests.search.test_best_plan import plan

STAGED = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}
TIED = "embed.weight"


def lines(found: Plan, kind: str) -> list[tuple[int, float]]:
    node = found.parameter_nodes[TIED]
    return [(line.stage, line.seconds) for line in found.lines if line.kind == kind and line.name == node]


def test_a_tied_weight_of_two_stages() -> None:
    """The head borrows the embedding's: its stage updates nothing of it and waits for two messages."""
    found = plan((2,), cluster=CLUSTER, **STAGED)
    assert [stage for stage, _ in lines(found, "optimizer")] == [0]
    latency, bandwidth = message_rate(Cluster.get(CLUSTER), 0, 1, 1)
    assert lines(found, "refresh") == [(1, pytest.approx(2 * (latency + 31 * 16 * 4 / bandwidth)))]


def test_a_tied_weight_of_two_chunks_of_one_stage() -> None:
    """Under ZB-V the first and last chunk lie on one stage: one state, one stored tensor, nothing sent."""
    found = plan((2,), cluster=CLUSTER, stages=2, microbatches=2, schedule="zb-v")
    assert [stage for stage, _ in lines(found, "optimizer")] == [0]
    assert lines(found, "refresh") == []
    held = sum(h.bytes for h in found.holdings if h.kind == "optimizer")
    assert held == found.predicted.optimizer_bytes
