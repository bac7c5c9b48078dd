"""What a plan's graph offers is found once, and again for whatever it depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler import offers as module
from autopar.compiler.offers import offers
from autopar.errors import PlanMismatchError
from autopar.ir.graph import Graph
from autopar.passes.annotate.annotate import annotate
from autopar.placement.prices import placement_options
from autopar.planner.prepare import prepare
from autopar.planner.step_graphs import step_graph
from autopar.plans.plan import Plan
from autopar.runtime.comm.groups import AxisGroup
from tests.helpers.planning import CLUSTER

ALONE = AxisGroup(None, 1, 0)
MESH = (2, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "offers"


@pytest.fixture
def annotations() -> list[Graph]:
    return []


@pytest.fixture
def planned() -> tuple[Plan, Graph]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(9, 33), nn.LayerNorm(33), nn.Linear(33, 5)), torch.randn(7, 9)
    plan = autopar.plan(model, MESH, x, loss_fn=torch.sum, cluster=CLUSTER, options=autopar.Options(mesh_search=False))
    base = prepare(model, (x,), {}, device="cpu", loss_fn=torch.sum, training=True)
    return plan, step_graph(base.graph, base.loss, base.batch)


def found(plan: Plan, graph: Graph, annotations: list[Graph]) -> module.Through:
    def annotated(graph: Graph) -> Graph:
        annotations.append(graph)
        return annotate(graph, plan.mesh)

    return offers(plan, graph, annotated, ALONE)


def test_the_graph_is_annotated_once(planned: tuple[Plan, Graph], annotations: list[Graph]) -> None:
    plan, graph = planned
    fresh = found(plan, graph, annotations)
    assert found(plan, graph, annotations) == fresh == placement_options(annotate(graph, plan.mesh), plan.mesh)
    assert len(annotations) == 1


def test_a_file_that_is_damaged_or_of_another_kind_is_made_again(
    planned: tuple[Plan, Graph], annotations: list[Graph], folder: Path
) -> None:
    fresh = found(*planned, annotations)
    (file,) = folder.iterdir()
    file.write_text("garbage")
    assert found(*planned, annotations) == fresh
    for text in ("[", '[["f32[2]", 5]]', '[["none", []]]', '[["f32[2]", [["S(x)"]]]]', "{}x"):
        module.write(module.KIND, module._key(*planned, None), text)
        assert found(*planned, annotations) == fresh
    assert len(annotations) == 7


def test_an_edited_plan_is_checked_against_what_is_on_offer(
    planned: tuple[Plan, Graph], annotations: list[Graph]
) -> None:
    plan, graph = planned
    found(plan, graph, annotations)
    name, strategy = next((name, one) for name, one in plan.strategies.items() if one.inputs)
    torn = replace(strategy, outputs=(strategy.inputs[0][::-1] + strategy.inputs[0],) * len(strategy.outputs))
    with pytest.raises(PlanMismatchError, match=name):
        found(replace(plan, strategies={**plan.strategies, name: torn}), graph, annotations)
    with pytest.raises(PlanMismatchError, match="other"):
        found(replace(plan, nodes={**plan.nodes, "other": plan.nodes[name]}), graph, annotations)


def test_without_a_cache_it_is_found_each_time(
    planned: tuple[Plan, Graph], annotations: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    assert found(*planned, annotations) == found(*planned, annotations)
    assert len(annotations) == 2
