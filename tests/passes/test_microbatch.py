"""The graph of one microbatch: what it says, and that all microbatches together compute what the whole batch does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.passes.pipeline.microbatch import microbatch, split_inputs
from tests.helpers import models
from tests.helpers.interpret import interpret
from tests.helpers.lowering import plain
from tests.helpers.microbatches import run_microbatches
from tests.helpers.pass_text import check
from tests.zoo.check import Case, compare, make_case
from tests.zoo.hugging_face import FAMILIES
from tests.zoo.models import ZOO

transformers.logging.set_verbosity_error()

CROSS_ENTROPY = """
graph()
%w: f32[4, 4] = param("w")
%x: f32[4, 4] = input("x")
%labels: i64[4] = input("labels")
backward %g: f32[] = tangent("0")
%y: f32[4, 4] = aten.mm.default(%x, %w)
%s: f32[4] = aten.sum.dim_IntList(%y, [1])
%ne: b8[4] = aten.ne.Scalar(%labels, -100)
%zero: f32[] = aten.full.default([], 0.0)
%kept: f32[4] = aten.where.self(%ne, %s, %zero)
%count: i64[] = aten.sum.default(%ne)
%total: f32[] = aten.sum.default(%kept)
%loss: f32[] = aten.div.Tensor(%total, %count)
backward %d: f32[] = aten.div.Tensor(%g, %count)
backward %dk: f32[4] = aten.where.self(%ne, %d, %zero)
backward %dr: f32[4, 1] = aten.reshape.default(%dk, [4, 1])
backward %dy: f32[4, 4] = aten.expand.default(%dr, [4, 4])
backward %xt: f32[4, 4] = aten.permute.default(%x, [1, 0])
backward %dw: f32[4, 4] = aten.mm.default(%xt, %dy)
return output "0" = %loss
return gradient "w" = %dw
"""


def _case(model: nn.Module, batch: object) -> Case:
    case = make_case(model, batch)
    return Case(plain(case.graph), case.values, case.expected)


def test_the_graph_of_a_microbatch_reads() -> None:
    """The count of tokens comes from the prelude."""
    check(
        lambda graph: microbatch(graph, 2, {"x": 0, "labels": 0}).graph,
        CROSS_ENTROPY,
        """graph()
        %w: f32[4, 4] = param("w")
        %x: f32[2, 4] = input("x")
        %labels: i64[2] = input("labels")
        %count_whole: i64[] = input("prelude.count")
        backward %g: f32[] = tangent("0")
        %y: f32[2, 4] = aten.mm.default(%x, %w)
        %s: f32[2] = aten.sum.dim_IntList(%y, [1])
        %ne: b8[2] = aten.ne.Scalar(%labels, -100)
        %zero: f32[] = aten.full.default([], 0.0)
        %kept: f32[2] = aten.where.self(%ne, %s, %zero)
        %total: f32[] = aten.sum.default(%kept)
        %loss: f32[] = aten.div.Tensor(%total, %count_whole)
        backward %d: f32[] = aten.div.Tensor(%g, %count_whole)
        backward %dk: f32[2] = aten.where.self(%ne, %d, %zero)
        backward %dr: f32[2, 1] = aten.reshape.default(%dk, [2, 1])
        backward %dy: f32[2, 4] = aten.expand.default(%dr, [2, 4])
        backward %xt: f32[4, 2] = aten.permute.default(%x, [1, 0])
        backward %dw: f32[4, 4] = aten.mm.default(%xt, %dy)
        return output "0" = %loss
        return gradient "w" = %dw
        """,
    )


def test_the_count_of_tokens_comes_from_the_prelude() -> None:
    made = microbatch(Graph.from_text(CROSS_ENTROPY), 2, {"x": 0, "labels": 0})
    assert "%count:" not in made.graph.to_text()
    assert made.combine == {("output", "0"): "sum", ("gradient", "w"): "sum"}
    assert made.inputs == {"x": 0, "labels": 0, "prelude.count": None}
    assert made.prelude is not None
    assert [node.name for node in made.prelude] == ["labels", "ne", "count"]


def test_one_microbatch_is_the_whole_batch() -> None:
    graph = Graph.from_text(CROSS_ENTROPY)
    made = microbatch(graph, 1)
    assert made.graph is graph
    assert made.prelude is None


def test_batch_that_does_not_divide() -> None:
    with pytest.raises(OptionsError, match="a batch of 4 does not divide into 3 microbatches; microbatches=1, 2, 4 do"):
        microbatch(Graph.from_text(CROSS_ENTROPY), 3, {"x": 0, "labels": 0})


def test_whole_inputs_and_constant_parts() -> None:
    """A mask for all samples stays whole; a penalty on a weight, the same for all, is added once."""
    graph = Graph.from_text("""
    graph()
    %w: f32[3] = param("w")
    %x: f32[6, 3] = input("x")
    %mask: f32[1, 3] = input("mask")
    %y: f32[6, 3] = aten.mul.Tensor(%x, %w)
    %m: f32[6, 3] = aten.mul.Tensor(%y, %mask)
    %z: f32[6, 3] = aten.full.default([6, 3], 1.0)
    %a: f32[6, 3] = aten.add.Tensor(%m, %z)
    %total: f32[] = aten.sum.default(%a)
    %penalty: f32[] = aten.sum.default(%w)
    %loss: f32[] = aten.add.Tensor(%total, %penalty)
    return output "0" = %loss
    return output "1" = %m
    return output "2" = %penalty
    """)
    assert split_inputs(graph) == {"x": 0, "mask": None}
    made = microbatch(graph, 3)
    assert "%z_piece: f32[2, 3] = aten.full.default([2, 3], 1.0)" in made.graph.to_text()
    assert [made.combine["output", name] for name in "012"] == ["sum", "concatenate:0", "same"]
    values = {"w": torch.randn(3), "x": torch.randn(6, 3), "mask": torch.randn(1, 3)}
    compare(run_microbatches(made, values), interpret(graph, values), "microbatches", 1e-6)


def test_positions_in_the_batch_come_from_the_prelude() -> None:
    """Piece k of a range over samples is another one for each k."""
    graph = Graph.from_text("""
    graph()
    %x: f32[4, 3] = input("x")
    %w: f32[3] = param("w")
    %y: f32[4, 3] = aten.mul.Tensor(%x, %w)
    %rows: i64[4] = aten.arange.default(4)
    %tall: i64[4, 1] = aten.reshape.default(%rows, [4, 1])
    %z: f32[4, 3] = aten.mul.Tensor(%y, %tall)
    return output "0" = %z
    """)
    made = microbatch(graph, 2)
    values = {"w": torch.randn(3), "x": torch.randn(4, 3)}
    assert list(made.inputs.values()) == [0, 0]
    compare(run_microbatches(made, values), interpret(graph, values), "microbatches", 1e-6)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("vit", marks=pytest.mark.slow), "plain"])
def test_all_microbatches_are_the_batch(name: str) -> None:
    case = _case(*models.make(name))
    for count in (2, 8):
        compare(run_microbatches(microbatch(case.graph, count), case.values), case.expected, f"{name} {count}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", pytest.param("t5", marks=pytest.mark.slow)])
def test_padding(name: str) -> None:
    case = _case(*FAMILIES[name]())
    compare(run_microbatches(microbatch(case.graph, 3), case.values), case.expected, name)


class Parametrized(nn.Module):
    """Weights and tables that are computed from parameters, whose gradients are linear in what is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 6, 3, padding=1, groups=2), dim=2)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 5))
        self.table, self.norm = nn.Parameter(torch.randn(6, 5)), nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.spectral(self.normed(x)) * self.norm(self.table)
        return torch.tanh(x).square().mean()


def test_gradients_of_parametrizations_are_accumulated() -> None:
    case = _case(Parametrized(), (torch.randn(6, 8, 7),))
    ops = {node.op for node in case.graph}
    assert {"aten._weight_norm_interface_backward.default", "aten.native_layer_norm_backward.default"} <= ops
    for count in (2, 3):
        compare(run_microbatches(microbatch(case.graph, count), case.values), case.expected, f"{count}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["variational", "wav2vec2", "unispeech", "conv1d_transposed", "hiera", "indexing"])
def test_models_that_were_refused_without_a_reason(name: str) -> None:
    case = _case(*ZOO[name]())
    compare(run_microbatches(microbatch(case.graph, 2), case.values), case.expected, name)


@pytest.mark.slow
def test_batch_norm_couples_samples() -> None:
    case = _case(*models.make("resnet"))
    with pytest.raises(OptionsError, match=r"in resnet\.embedder.*couples the samples of a batch.*microbatches=1"):
        microbatch(case.graph, 2)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_nodes_know_of_their_form_is_true(name: str) -> None:
    graph = plain(make_case(*models.make(name)).graph)
    nodes = microbatch(graph, 2).graph.nodes
    known = [node for node in nodes if "form" in vars(node)]
    assert len(known) > len(nodes) / 3
    for node in known:
        fresh = replace(node)
        assert "form" not in vars(fresh)
        assert (node.form, node.is_symbolic) == (fresh.form, fresh.is_symbolic)


def test_one_tensor_in_two_places_is_another_form() -> None:
    """Two operands are one tensor in the graph of a microbatch, and were two in that of the batch, and the reverse."""
    text = """
        graph()
        %x: f32[4, 4] = input("x")
        %y: f32[4, 4] = input("y")
        %a: f32[4, 4] = aten.mul.Tensor(%x, %x)
        %b: f32[4, 4] = aten.mul.Tensor(%a, %y)
        return output "0" = %b
        """
    made = microbatch(Graph.from_text(text), 2).graph
    assert [replace(node).form == node.form for node in made] == [True] * len(made)
    assert made["a"].form != made["b"].form
