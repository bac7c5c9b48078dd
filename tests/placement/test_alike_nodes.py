"""Nodes of one class that choose alike are priced once: lines and memory are those of pricing each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.placement.breakdown import cost_breakdown
from autopar.placement.memory_bound import memory
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import Prices
from autopar.planner import mesh_solution
from tests.helpers.plan_model import make_plan


def _steps(monkeypatch: pytest.MonkeyPatch) -> list[PlacedStep]:
    """The steps that planning a small model prices: of the plan and of its baselines."""
    steps = list[PlacedStep]()
    with monkeypatch.context() as patch:
        patch.setattr(
            mesh_solution, "cost_breakdown", lambda step, **own: steps.append(step) or cost_breakdown(step, **own)
        )  # type: ignore[func-returns-value]
        make_plan(precision="bf16")
    return steps


def test_a_class_costs_what_its_nodes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _steps(monkeypatch)
    assert steps
    for step in steps:
        assert len(set(step.graph.classes.values())) < len(step.graph.nodes)
        alone = replace(step, graph=replace(step.graph, classes={}))
        assert cost_breakdown(step) == cost_breakdown(alone)
        assert memory(step) == memory(alone)


def test_a_class_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step, priced = _steps(monkeypatch)[0], list[str]()
    node_seconds = Prices.node

    def spy(prices: Prices, node, inputs, strategy):  # type: ignore[no-untyped-def]
        priced.append(step.graph.classes.get(node.name, node.name))
        return node_seconds(prices, node, inputs, strategy)

    monkeypatch.setattr(Prices, "node", spy)
    cost_breakdown(step)
    assert len(priced) == len(set(priced))
