"""A small model, planned once for all tests that question a plan."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.graph import Graph
from autopar.placement.alternatives import explanation_fields
from autopar.placement.formulation import Instance
from autopar.planner import to_plan as write_plan
from autopar.plans.plan import Plan
from autopar.solver.problem import Ints

PIN = "blocks.1.first.weight"


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.first = nn.Linear(512, 2048)
        self.second = nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Small(nn.Module):
    """An embedding, three equal blocks, and a head with a loss; one parameter that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 512)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(512, 1000)
        self.scale = nn.Parameter(torch.ones(512), requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_plan(**options: Any) -> Plan:
    with torch.device("meta"):
        model, ids = Small(), torch.empty(32, 512, dtype=torch.long)
    batch = {"ids": ids, "labels": ids}
    return autopar.plan(model, (2, 2), batch, cluster="dgx-a100-80gb", options=autopar.Options(**options))


@cache
def solved() -> tuple[Plan, Instance, Ints]:
    """A plan, and the instance and choices it was made from."""
    seen: list[tuple[Instance, Ints]] = []

    def spy(instance: Instance, graph: Graph, chosen: Ints) -> dict[str, Any]:
        seen.append((instance, chosen))
        return explanation_fields(instance, graph, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "explanation_fields", spy)
        plan = make_plan()
    return plan, *seen[-1]


@cache
def pinned_plan() -> Plan:
    """The same model with the first layer of every block pinned, and no ZeRO."""
    return make_plan(pins={PIN: "S(0),S(1)"}, zero=0)
