"""Sizes that divide nothing: right on every mesh, divided all the same, and priced with their padding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.cluster.description import Cluster
from autopar.ir.node import TensorType
from autopar.ir.placements import Strategy, is_shard, parse_placements, shard_dim
from autopar.ir.reshard import make_hop
from autopar.options import Options
from autopar.placement.prices import Prices
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.timings import Timings
from autopar.search.best_plan import best_plan
from tests.helpers.marks import slow_but
from tests.zoo.check import Case, check_assignments, compute_bound, make_case

VOCABULARY, TOKENS, HEADS, WIDTH = 257, 17, 3, 96


class Block(nn.Module):
    """One layer of attention of three heads between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.mix(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = (x + self.out(y)) @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


@cache
def case(batch: int) -> Case:
    ids = torch.randint(VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(0))
    return make_case(Block(), (ids,))


@pytest.mark.parametrize(
    "mesh", [(2,), (3,), (2, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in ((4,), (3, 2)))]
)
@pytest.mark.parametrize("batch", slow_but([6], [1, 6]))
def test_any_assignment_is_right(batch: int, mesh: tuple[int, ...]) -> None:
    check_assignments(case(batch), mesh, range(4))


def test_three_heads_on_two_devices_divide_attention() -> None:
    slow = compute_bound(Cluster.get("dgx-a100-80gb"))
    slow = replace(slow, device=replace(slow.device, memory_bandwidth=1e11))
    solved, _ = solve_mesh(PlanRequest(case(1).graph, None, 1, (2,), slow, Options(zero=0)), case(1).graph, Timings())
    attention = [n for n in solved.instance.graph.nodes if n.op.startswith("autopar.attention")]
    assert len(attention) == 2
    for node in attention:
        placed = solved.assignment.strategies[node.name].outputs[0]
        assert shard_dim(placed[0]) == 1, f"{node.op} {placed}"


def test_six_sequences_on_four_devices_are_divided_on_two_axes() -> None:
    """Four shards of six sequences would leave a device without any; sequences on one axis, and sequences again or
    heads on the other, leave none. (Results of attention may rest whole: where messages cost next to nothing, that is
    as good.)"""
    slow = compute_bound(Cluster.get("dgx-a100-80gb"))
    plan = best_plan(PlanRequest(case(6).graph, None, 6, (4,), slow, Options()), Timings())
    assert plan.mesh == (2, 2)
    attention = [node.name for node in case(6).graph if node.op.startswith("autopar.attention")]
    assert len(attention) == 2
    for name in attention:
        assert all(map(is_shard, plan.strategies[name].outputs[0])), f"{name} {plan.strategies[name]}"


@pytest.mark.parametrize(
    ("shape", "mesh", "source", "target", "padded"),
    [
        ((257,), (4,), "S(0)", "R", 4 * 65),
        ((257,), (4,), "P", "S(0)", 4 * 65),
        ((257,), (4,), "P", "R", 257),
        ((17, 6), (4,), "S(0)", "S(1)", 4 * 5 * 8),
        ((6, 5), (2, 2), "S(0),S(0)", "S(0),R", 2 * 2 * 5),
        ((8, 6), (4,), "S(0)", "R", 8 * 6),
    ],
)
def test_collectives_are_priced_with_their_padding(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: str, target: str, padded: int
) -> None:
    hop = make_hop(TensorType(shape, torch.float32), parse_placements(source), parse_placements(target), mesh)
    assert hop is not None and hop.collective is not None
    assert hop.collective.bytes == 4 * padded


def test_an_operation_takes_as_long_as_the_largest_shard() -> None:
    graph = case(6).graph
    node = next(node for node in graph.nodes if node.op == "aten.mm.default")
    kinds = tuple(graph.type_of(value) for value in node.operands)
    cluster = compute_bound(Cluster.get("dgx-a100-80gb"))
    rows = kinds[0].shape[0]
    assert rows == 6 * TOKENS == 102
    places = (parse_placements("S(0)"), parse_placements("R"))
    strategy = Strategy(places, (parse_placements("S(0)"),))

    def of_rows(rows: int) -> TensorType:
        return TensorType((rows, kinds[0].shape[1]), kinds[0].dtype)

    def seconds(first: TensorType, mesh: tuple[int, ...]) -> float:
        result = TensorType((first.shape[0], node.type.shape[1]), node.type.dtype)
        return Prices(cluster, mesh, {}, 0).node(replace(node, types=(result,)), (first, kinds[1]), strategy)

    # 102 rows on 4: 26, 26, 26, 24. As much as of 103 or 104, and more than of 100.
    assert seconds(kinds[0], (4,)) == seconds(of_rows(103), (4,)) == seconds(of_rows(104), (4,))
    assert seconds(kinds[0], (4,)) > seconds(of_rows(100), (4,))
