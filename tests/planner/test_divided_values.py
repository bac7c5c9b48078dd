"""Which shards are of samples, of positions, or of neither; products of attention under a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.placements import is_shard
from autopar.layout import Layout
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.planner.roles.divided_values import shards_of, with_gradients
from benchmarks.layout_grid import VOCABULARY, Loss, collectives
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import Case, Stack, text
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


class Positioned(nn.Module):
    """Layers under a tied head, with a weight for each position: of ``shape`` it is added to the embedding, with
    ``prefix`` it comes ahead of it. The loss is of the next token, for which the scores of the last are left out."""

    def __init__(self, shape: tuple[int, ...], prefix: bool = False) -> None:
        super().__init__()
        self.stack, self.positions, self.prefix = Stack(2), nn.Parameter(0.1 * torch.randn(shape)), prefix

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stack.embed(input_ids)
        x = torch.cat([self.positions.expand(len(x), -1, -1), x], 1) if self.prefix else x + self.positions
        for layer in self.stack.layers:
            x = x + layer(x)
        scores = self.stack.head(x)[:, -input_ids.shape[1] : -1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def positioned(shape: tuple[int, ...], length: int = 8, prefix: bool = False) -> Case:
    torch.manual_seed(0)
    return Positioned(shape, prefix), text(6, length)


DIVIDED = Layout(tensor=2, data=1, sequence_parallel=True)


@pytest.mark.parametrize("shape", [(8, 16), (1, 8, 16)], ids=str)
def test_weights_of_positions_leave_sequences_divided(shape: tuple[int, ...]) -> None:
    """Each tensor rank adds its own rows of them."""
    plan = planned(lambda: positioned(shape), (2,), layout=DIVIDED)
    assert "reduce_scatter" in collectives(plan, "tp")
    assert not {"all_reduce", "all_to_all"} & collectives(plan, "tp")


def test_weights_of_positions_are_whole_without_sequence_parallelism() -> None:
    layout = Layout(tensor=2, data=1, sequence_parallel=False)
    found = collectives(planned(lambda: positioned((8, 16)), (2,), layout=layout), "tp")
    assert "all_reduce" in found and "reduce_scatter" not in found


def test_gradients_behind_a_cut_are_of_what_they_meet() -> None:
    """``%rows`` follow from no input that is divided, and are added to positions."""
    graph = """graph()
        %q: f32[4, 8, 6] = input("q")
        %rows: f32[32, 6] = input("rows")
        %cut: f32[4, 8, 6] = aten.view.default(%rows, [4, 8, 6])
        %sum: f32[4, 8, 6] = aten.add.Tensor(%cut, %q)
        return output "0" = %sum
        """
    annotated = annotate(Graph.from_text(graph), (2,))
    found = shards_of(annotated, 0, {"q": 1}, {})
    assert Value("cut") not in found
    known = with_gradients(annotated, 0, found, {Value("cut"), Value("rows")})
    places = {name: {str(place[0]) for place in known[Value(name)]} for name in ("q", "rows", "cut", "sum")}
    assert places == {"q": {"S(1)"}, "rows": {"S(0/4)"}, "cut": {"S(1)"}, "sum": {"S(1)"}}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda: positioned((9, 16), 9), "'input_ids' i64[6, 9] has a sequence of 9 (dim 1), which does not divide; "),
        (lambda: positioned((2, 16), 8, prefix=True), "(aten.cat.default) takes no parts of the sequence on 2 tensor "),
    ],
)
def test_a_sequence_that_tensor_ranks_cannot_divide_is_refused(source: Any, said: str) -> None:
    """Before, the layout was not heard: sums of products were summed on every rank."""
    with pytest.raises(OptionsError) as caught:
        planned(source, (2,), layout=DIVIDED)
    assert said in str(caught.value)


def test_a_rank_with_one_sample_need_not_divide_its_sequence_evenly() -> None:
    layout = Layout(tensor=2, data=1, microbatch=1, sequence_parallel=True)
    plan = planned(lambda: positioned((9, 16), 9), (2,), layout=layout)
    assert "reduce_scatter" in collectives(plan, "tp") and "all_reduce" not in collectives(plan, "tp")


@pytest.mark.slow
def test_divided_weights_of_positions_on_processes() -> None:
    model, batch = positioned((8, 16))
    report = autopar.verify(model, 2, batch, options=Options(layout=DIVIDED), cluster=CLUSTER, timeout=120)
    assert report.ok, str(report)
    assert "all_reduce" not in collectives(report.plan, "tp")
