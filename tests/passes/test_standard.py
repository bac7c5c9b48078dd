"""The standard passes together, and what any pass promises."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Output, TensorType, Value
from autopar.passes.base import Pass, is_pure, run
from autopar.passes.normalise.eliminate_dead import RemoveDead
from autopar.passes.normalise.standard import STANDARD, normalise


def test_no_saved_value_is_a_view_after_normalising() -> None:
    from autopar.trace.tracer import trace

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(6, 18)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(x.shape[0], 5, 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
            mask = torch.ones(5, 5).tril().bool()
            scores = (q @ k.mT).masked_fill(~mask, -1e9)
            return (scores.softmax(-1) @ v).sum()

    graph = normalise(trace(Attention(), (torch.randn(4, 5, 6),), device="cpu").graph)
    saved = {v.node for n in graph if n.phase == "backward" for v in n.operands if graph[v.node].phase == "forward"}
    ops = {graph[name].op for name in saved}
    assert ops and not ops & {
        "aten.reshape.default",
        "aten.permute.default",
        "aten.expand.default",
        "aten.full.default",
    }
    assert normalise(graph).to_text() == graph.to_text()


def test_a_pass_that_breaks_a_graph_is_caught_with_the_graph() -> None:
    class Break(Pass):
        name = "break"

        def apply(self, graph: Graph) -> Graph:
            return Graph((), graph.outputs)

    kind = TensorType((2,), torch.float32)
    good = Graph((Node("x", "input", ("x",), types=(kind,)),), (Output("output", "0", Value("x")),))
    with pytest.raises(GraphError, match=r"(?s)after pass break: .*%x, which is not defined.*graph\(\)"):
        run([RemoveDead(), Break()], good)
    with pytest.raises(GraphError, match="before pass remove-dead"):
        RemoveDead()(Graph((), good.outputs))


def test_names_and_purity() -> None:
    assert all(step.name == step.name.lower() and "_" not in step.name for step in STANDARD)
    assert is_pure("aten.add.Tensor") and is_pure("aten.reshape.default")
    for op in (
        "aten.add_.Tensor",
        "aten.native_dropout.default",
        "aten.rand.default",
        "autopar.unknown",
        "input",
    ):
        assert not is_pure(op), op
