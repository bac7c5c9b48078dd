"""Few layers of deep stacks are left, which have what all have in common: strategies, shares of kernels, products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from autopar.cluster.description import Cluster
from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION
from autopar.passes.annotate import annotate as annotating
from autopar.passes.annotate.annotate import annotate
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.annotate.omit_layers import OmitLayers, Stack
from autopar.placement.fused_kernels import FusedKernels
from autopar.planner.roles.moves_between import _sums
from autopar.planner.roles.products import Products
from autopar.planner.step_graphs import step_graph
from tests.helpers.models import Case, gpt2, llama, text
from tests.helpers.pass_text import check
from tests.helpers.planning import requested
from tests.passes.test_omit_layers import deep
from tests.planner.test_short_rehearsal import Layer, Turns, skips, turns, two_stacks


def mixture(layers: int) -> Case:
    """A mixture of experts."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    return MixtralForCausalLM(config), text()


class Nested(nn.Module):
    """Two stacks whose layers are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.ModuleList(Turns(9) for _ in range(2))
        for stack in self.g:
            stack.layers = nn.ModuleList(Layer(64) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stack in self.g:
            for layer in stack.layers:
                x = layer(x)
        loss: torch.Tensor = x.square().mean()
        return loss


def nested() -> Case:
    return Nested(), {"x": torch.randn(64, 64)}


MODELS = [partial(gpt2, 10), partial(llama, 11), partial(mixture, 11), turns, two_stacks, nested]
NAMES = ["gpt2", "llama", "mixture", "turns", "two stacks", "nested"]


def left(before: str, after: str, longer: str = "") -> None:
    """Of the folded graph ``before``, what ``longer`` leaves is ``after``."""

    def plain(graph: Graph) -> Graph:
        few = FewLayers(longer)(fold_layers(graph))
        return Graph(few.nodes, few.outputs, few.symbols)

    check(plain, before, after)


def folded(model: Callable[[], Case]) -> Graph:
    request = requested(model, (2, 2))
    return fold_layers(step_graph(request.graph, request.loss, request.batch))


def test_two_layers_are_left_at_each_end_and_two_more_of_a_longer_stack() -> None:
    left(deep(10), deep(10, *range(2, 8)))
    left(deep(10), deep(10, *range(2, 6)), longer="h.")
    left(deep(10), deep(10, *range(2, 8)), longer="another.")


def test_layers_that_take_turns_are_left_in_turns() -> None:
    left(deep(12, turns=3), deep(12, *range(3, 9), turns=3))


def test_few_layers_stay_as_they_are() -> None:
    left(deep(7), deep(7))
    assert FewLayers().shortened(fold_layers(Graph.from_text(deep(7))))[1] == ()


def test_a_stack_whose_values_are_read_outside_keeps_all_layers() -> None:
    graph = folded(skips)
    assert FewLayers()(graph) == graph


def test_how_many_times_what_a_longer_stack_has_is_left_out() -> None:
    assert FewLayers("h.").missing(Stack("h.", 10, 1, 0, 10)) == 3.0
    assert FewLayers("h.").missing(Stack("h.", 128, 1, 1, 128)) == 61.5


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_every_class_has_its_first_node_among_them(model: Callable[[], Case]) -> None:
    graph = folded(model)
    short, stacks = FewLayers().shortened(graph)
    assert stacks and len(short) < len(graph)
    assert set(graph.classes.values()) == set(short.classes.values()) <= {node.name for node in short.nodes}


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_strategies_are_those_that_all_layers_have(monkeypatch: pytest.MonkeyPatch, model: Callable[[], Case]) -> None:
    graph = folded(model)
    found = annotate(graph, (2, 2)).strategies
    monkeypatch.setattr(annotating.FewLayers, "shortened", lambda self, graph: (graph, ()))
    whole = annotate(graph, (2, 2)).strategies
    assert found.keys() == whole.keys()
    assert all(found[first] == whole[first] for first in graph.classes.values())
    for node in graph.nodes:  # What is saved follows its readers, of which layers at the ends may have others.
        assert node.op == SAVED_ACTIVATION or set(found[node.name]) == set(whole[node.name]), node


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_kernels_are_those_of_all_layers(model: Callable[[], Case]) -> None:
    graph, device = folded(model), Cluster.get("dgx-a100-80gb").device
    found, whole = FusedKernels.of_layers(graph, device), FusedKernels.of(graph, device)
    assert [found.share_of(node) for node in graph.nodes] == [whole.share_of(node) for node in graph.nodes]
    assert any(whole.share_of(node) for node in graph.nodes)
    assert found.inside == whole.inside


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_products_are_those_of_all_layers(model: Callable[[], Case]) -> None:
    graph = annotate(folded(model), (2, 2))
    dims = {node.target: 0 for node in graph.placeholders("input")}
    few, whole = Products(FewLayers()(graph), 2, dims), Products(graph, 2, dims)
    assert any(name in whole.names for name in graph.classes.values())
    for first in set(graph.classes.values()):
        node = graph[first]
        for own in ("names", "parameters", "choosing", "views", "weights", "dependent"):
            assert (first in getattr(few, own)) == (first in getattr(whole, own)), (first, own)
        for axis in range(2):
            for part in (few.samples, whole.samples), (few.positions, whole.positions):
                one, other = ({v: p for v, p in each[axis].items() if v.node == first} for each in part)
                assert one == other, node
    for axis in range(2):
        one, other = ({v for v in _sums(each, axis) if v.node in graph.classes.values()} for each in (few, whole))
        assert one == other


def test_layers_that_alone_read_a_result_from_outside_are_kept() -> None:
    layers = [f"%h{i}: f32[4] = aten.tanh.default(%{f'h{i - 1}' if i else 'x'})  @h.{i}.act" for i in range(12)]
    text = "\n".join(["graph()", '%x: f32[4] = input("x")', *layers, 'return output "0" = %h11'])
    assert "@h.5" not in few_text(text)
    outside = text.replace("%h0:", "%s: f32[4] = aten.exp.default(%x)\n%h0:")
    assert "@h.5" not in few_text(outside.replace("tanh.default(%x)", "tanh.default(%s)"))
    read = outside.replace("%h6: f32[4] = aten.tanh.default(%h5)", "%h6: f32[4] = aten.mul.Tensor(%h5, %s)")
    folded_graph = fold_layers(Graph.from_text(read))
    with pytest.raises(GraphError, match="are left out read %s"):
        OmitLayers(Stack("h.", 12, 1, 0, 12), 5, 3)(folded_graph)


def few_text(text: str) -> str:
    return FewLayers()(fold_layers(Graph.from_text(text))).to_text()
