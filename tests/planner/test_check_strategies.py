"""Copies in chunks are checked as the nodes that they copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Options
from autopar.ir.placements import parse_placements
from autopar.planner.check_strategies import original_name
from tests.helpers.run_plan import Bench


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("cos_at1", "cos"),
        ("cos_at12_", "cos"),
        ("cos_at1_rest", "cos_rest"),
        ("topk_at1_result1_rest", "topk_result1_rest"),
        ("cos_recomputed_at1", "cos"),
        ("cos_at1_recomputed", "cos"),
        ("mean_at1_more", "mean_at1_more"),
        ("cos_rest", "cos_rest"),
    ],
)
def test_the_node_that_a_name_copies(copy: str, original: str) -> None:
    assert original_name(copy) == original


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_recompute_as_planned(schedule: str) -> None:
    """Chunks receive values that the whole step would recompute: that is no other model, for which another program
    would be solved."""
    torch.manual_seed(0)
    bench = Bench(Loss(), {"ids": torch.randint(0, 64, (4, 8))})
    options = Options(stages=2, microbatches=2, recompute="full", schedule=schedule)
    plan = autopar.plan(bench.model, (4,), bench.batch, options=options)
    assert plan.recomputed
    results, expected = bench.run(plan), bench.expected()
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=1e-4, atol=1e-5)


class Twice(nn.Module):
    """One weight that is used twice in each half: a chunk adds parts of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.first, self.second, self.first, self.first):
            x = layer(x).tanh()
        return x.square().mean()


def test_sums_that_a_chunk_adds_are_placed_alike() -> None:
    torch.manual_seed(0)
    bench = Bench(Twice(), {"x": torch.randn(8, 8)})
    plan = autopar.plan(bench.model, (4,), bench.batch, options=Options(stages=2, microbatches=2))
    sums = [name for name, node in plan.nodes.items() if node.op == "aten.add.Tensor" and name.endswith("_sum")]
    assert sums
    results, expected = bench.run(plan), bench.expected()
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=1e-4, atol=1e-6)
    partial = parse_placements("P(sum)")
    edited = replace(plan.strategies[sums[0]], inputs=(partial, parse_placements("R")), outputs=(partial,))
    with pytest.raises(autopar.PlanMismatchError, match="a sum of parts of a gradient"):
        bench.run(replace(plan, strategies={**plan.strategies, sums[0]: edited}))
