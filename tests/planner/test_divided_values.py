"""Which shards are of samples, of positions, or of neither; products of attention under a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.placements import is_shard
from autopar.layout import Layout
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.planner.roles.divided_values import shards_of
from benchmarks.layout_grid import VOCABULARY, Loss
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import Case
from tests.helpers.planning import CLUSTER, planned


def places_of(samples: int, mesh: tuple[int, ...], dim: int, value: str) -> set[str]:
    """The placements of ``value`` whose shards on the last axis are of ``dim`` of the input."""
    rows = 4 * samples
    text = f"""graph()
        %q: f32[{samples}, 4, 8, 6] = input("q")
        %rows: f32[{rows}, 8, 6] = aten.view.default(%q, [{rows}, 8, 6])
        %keys: f32[{rows}, 6, 8] = aten.transpose.int(%rows, 1, 2)
        %scores: f32[{rows}, 8, 8] = aten.bmm.default(%rows, %keys)
        return output "0" = %scores
        """
    found = shards_of(annotate(Graph.from_text(text), mesh), len(mesh) - 1, {"q": dim}, {})
    return {",".join(map(str, places)) for places in found.get(Value(value), ())}


@pytest.mark.parametrize("value", ["rows", "scores"])
def test_shards_behind_the_only_sample_of_a_data_rank_are_heads(value: str) -> None:
    """Samples and heads are one dim. Its ``S(0)`` on the tensor axis are samples where the data ranks have all of them,
    heads where each has one, and samples again where each has two."""
    alone, two = (places_of(samples, (2, 2), 0, value) for samples in (2, 4))
    assert "R,S(0)" in alone and "S(0),S(0)" not in alone
    assert "R,S(0)" in two and "S(0),S(0)" in two
    assert "S(0),S(0)" in places_of(2, (2, 2), 1, value), "the dim of heads"


def test_an_axis_alone_is_as_before() -> None:
    assert places_of(4, (2,), 0, "rows") == {"S(0)"}
    assert places_of(4, (2,), 1, "rows") == {"S(0/4)"}


def eager_attention() -> Case:
    """A Llama whose attention is written out, and two samples."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        attn_implementation="eager", bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))
    return Loss(LlamaForCausalLM(config)), {"input_ids": ids, "labels": ids}


def slower() -> Cluster:
    """Computing takes longer than messages, so that what is not divided shows."""
    cluster = Cluster.get(CLUSTER)
    device = replace(cluster.device, peak_flops={"f32": 1e12}, launch_seconds=1e-9, view_seconds=1e-10)
    return replace(cluster, device=device)


def undivided(plan: autopar.Plan) -> list[str]:
    """The products of attention of which tensor ranks compute the same, or the same part of a sum."""
    axis = plan.axis_names.index("tp")
    batched = [name for name, node in plan.nodes.items() if node.op == "aten.bmm.default"]
    assert len(batched) == 12
    return [name for name in batched if not is_shard(plan.strategies[name].outputs[0][axis])]


CASES: list[tuple[int, dict[str, Any]]] = [
    (4, {"tensor": 2, "data": 2, "sequence_parallel": False}),
    (2, {"tensor": 2, "data": 1, "microbatch": 1, "sequence_parallel": False}),
    (4, {"tensor": 2, "data": 2, "microbatch": 1, "sequence_parallel": True}),
]


@pytest.mark.parametrize(("devices", "fields"), slow_rows_but([0], CASES), ids=str)
def test_heads_are_divided_among_tensor_ranks(devices: int, fields: dict[str, Any]) -> None:
    """With one sample on each data rank."""
    assert undivided(planned(eager_attention, (devices,), slower(), layout=Layout(**fields))) == []


@pytest.mark.slow
def test_written_attention_under_a_layout_on_processes() -> None:
    model, batch = eager_attention()
    options = Options(layout=Layout(tensor=2, data=2, sequence_parallel=False))
    report = autopar.verify(model, 4, batch, options=options, cluster=slower(), timeout=120)
    assert report.ok, str(report)
    assert undivided(report.plan) == []
