"""The small passes, text in, text out."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Output, TensorType, Value
from autopar.passes.base import Pass, is_pure, run
from autopar.passes.normalise.canonical_views import CanonicalViews
from autopar.passes.normalise.drop_noops import DropNoops
from autopar.passes.normalise.eliminate_common import MergeCommon
from autopar.passes.normalise.eliminate_dead import RemoveDead
from autopar.passes.normalise.sink_views import SinkViews
from autopar.passes.normalise.standard import STANDARD, normalise

HEAD = """graph(b=8)
    %x: f32[b, 4] = input("x")
    %w: f32[4, 4] = param("w")
    backward %dy: f32[b, 4] = tangent("0")
    """


def check(step: Pass, before: str, after: str) -> None:
    """``step`` turns the body ``before`` into ``after``; both read the same inputs."""
    found = step(Graph.from_text(HEAD + before))
    assert found.to_text() == Graph.from_text(HEAD + after).to_text()


def test_drop_noops() -> None:
    check(
        DropNoops(),
        """
        %a: f32[b, 4] = aten.detach.default(%x)
        %c: f32[b, 4] = aten.clone.default(%a, memory_format=torch.contiguous_format)
        %d: f32[b, 4] = aten.view.default(%c, [-1, 4])
        %e: f32[b, 4] = aten.slice.Tensor(%d, 0, 0, 9223372036854775807)
        %f: f32[b, 4] = aten.expand.default(%e, [b, 4])
        %g: f32[b, 4] = aten._to_copy.default(%f, dtype=torch.float32)
        %h: f32[b, 4] = aten.add.Tensor(%g, 0)
        %i: f32[b, 4] = aten.mul.Tensor(%h, 1.0)
        %none: f32[0] = aten.full.default([0], 0)
        %j: f32[b, 4] = aten.cat.default([%none, %i], 1)
        %k: f32[b, 4] = aten.permute.default(%j, [0, 1])
        %l: f32[b, 4] = aten.relu.default(%k)
        return output "0" = %l
        """,
        """
        %none: f32[0] = aten.full.default([0], 0)
        %l: f32[b, 4] = aten.relu.default(%x)
        return output "0" = %l
        """,
    )


def test_drop_noops_keeps_what_changes_something() -> None:
    body = """
        %a: f64[b, 4] = aten._to_copy.default(%x, dtype=torch.float64)
        %c: f32[b, 4] = aten.slice.Tensor(%x, 0, 0, 9223372036854775807, 1)
        %d: f32[1, 4] = aten.slice.Tensor(%x, 0, 0, 1)
        %e: f32[b, 4] = aten.mul.Tensor(%d, %x)
        %n: i64[b] = aten.arange.default(b)
        %f: f32[b] = aten.add.Tensor(%n, 0.0)
        %g: f32[b, 4] = aten.permute.default(%x, [1, 0])
        %h: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %t: b8[] = aten.full.default([], True)
        %m: b8[4] = aten.ne.Scalar(%w, 1)
        %k: b8[4] = aten.bitwise_and.Tensor(%t, %m)
        %p: f32[b, 4] = aten.constant_pad_nd.default(%x, [1, -1])
        return output "0" = %a
        return output "1" = %e
        return output "2" = %f
        return output "3" = %g
        return output "4" = %h
        return output "5" = %k
        return output "6" = %p
        """
    after = body.replace("        %c: f32[b, 4] = aten.slice.Tensor(%x, 0, 0, 9223372036854775807, 1)\n", "")
    after = after.replace("        %k: b8[4] = aten.bitwise_and.Tensor(%t, %m)\n", "").replace("= %k", "= %m")
    check(DropNoops(), body, after)


def test_copies_stay_where_strides_matter() -> None:
    body = """
        %a: f32[b, 4] = aten.clone.default(%x, memory_format=torch.contiguous_format)
        %s: f32[2] = aten.as_strided.default(%a, [2], [4])
        return output "0" = %s
        """
    check(DropNoops(), body, body)
    check(CanonicalViews(), body, body)


def test_canonical_views() -> None:
    check(
        CanonicalViews(),
        """
        %a: f32[4*b] = aten.view.default(%x, [-1])
        %c: f32[2, 2*b] = aten._unsafe_view.default(%a, [2, -1])
        %d: f32[2, 1, 2*b] = aten.unsqueeze.default(%c, 1)
        %e: f32[2, 2*b] = aten.squeeze.dim(%d, 1)
        %f: f32[2*b, 2] = aten.t.default(%e)
        %g: f32[1, 2*b, 2] = aten.unsqueeze.default(%f, 0)
        %h: f32[2, 2*b, 1] = aten.transpose.int(%g, 0, -1)
        %i: f32[1, 2, 2*b] = aten.permute.default(%h, [-1, 0, 1])
        %j: f32[3, 2, 2*b] = aten.expand.default(%i, [3, -1, -1])
        %k: f32[3, 2, b] = aten.slice.Tensor(%j, -1, b)
        %l: f32[3, 1, b] = aten.slice.Tensor(%k, 1, -1)
        return output "0" = %l
        """,
        """
        %a: f32[4*b] = aten.reshape.default(%x, [4*b])
        %c: f32[2, 2*b] = aten.reshape.default(%x, [2, 2*b])
        %d: f32[2, 1, 2*b] = aten.reshape.default(%x, [2, 1, 2*b])
        %e: f32[2, 2*b] = aten.reshape.default(%x, [2, 2*b])
        %f: f32[2*b, 2] = aten.permute.default(%e, [1, 0])
        %g: f32[1, 2*b, 2] = aten.reshape.default(%f, [1, 2*b, 2])
        %h: f32[2, 2*b, 1] = aten.permute.default(%g, [2, 1, 0])
        %i: f32[1, 2, 2*b] = aten.permute.default(%g, [0, 2, 1])
        %j: f32[3, 2, 2*b] = aten.expand.default(%i, [3, 2, 2*b])
        %k: f32[3, 2, b] = aten.slice.Tensor(%j, 2, b, 2*b, 1)
        %l: f32[3, 1, b] = aten.slice.Tensor(%k, 1, 1, 2, 1)
        return output "0" = %l
        """,
    )


def test_merge_common() -> None:
    check(
        MergeCommon(),
        """
        backward %g: f32[b, 4] = aten.tanh.default(%x)
        %a: f32[b, 4] = aten.tanh.default(%x)
        %p: f32[b, 2], %p.1: f32[b, 2] = aten.split.Tensor(%a, 2, 1)
        %q: f32[b, 2], %q.1: f32[b, 2] = aten.split.Tensor(%g, 2, 1)
        %r: f32[b, 2] = aten.add.Tensor(%p.1, %q.1)
        %u: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %v: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %one: f32[] = aten.full.default([], 1)
        %true: b8[] = aten.full.default([], True)
        backward %z: f32[b, 4] = aten.mul.Tensor(%g, %dy)
        return output "0" = %r
        return output "1" = %u
        return output "2" = %v
        return gradient "w" = %z
        """,
        """
        %g: f32[b, 4] = aten.tanh.default(%x)
        %p: f32[b, 2], %p.1: f32[b, 2] = aten.split.Tensor(%g, 2, 1)
        %r: f32[b, 2] = aten.add.Tensor(%p.1, %p.1)
        %u: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        %v: f32[b, 4] = aten.bernoulli.p(%x, 0.5)
        backward %one: f32[] = aten.full.default([], 1)
        backward %true: b8[] = aten.full.default([], True)
        backward %z: f32[b, 4] = aten.mul.Tensor(%g, %dy)
        return output "0" = %r
        return output "1" = %u
        return output "2" = %v
        return gradient "w" = %z
        """,
    )


def test_sink_views() -> None:
    check(
        SinkViews(),
        """
        %i: i64[4] = aten.arange.default(4)
        %j: i64[4] = aten.mul.Tensor(%i, 2)
        %t: f32[4, b] = aten.permute.default(%x, [1, 0])
        %r: f32[2, 2, b] = aten.reshape.default(%t, [2, 2, b])
        %e: f32[2, 2, b] = aten.exp.default(%r)
        %f: f32[2, 2, b] = aten.mul.Tensor(%e, %j)
        backward %m: f32[2, 2, b] = aten.mul.Tensor(%r, %e)
        backward %n: f32[2, 2, b] = aten.mul.Tensor(%m, %j)
        backward %o: f32[4, b] = aten.mul.Tensor(%t, %n)
        return output "0" = %f
        return gradient "w" = %o
        """,
        """
        %i: i64[4] = aten.arange.default(4)
        %j: i64[4] = aten.mul.Tensor(%i, 2)
        %t: f32[4, b] = aten.permute.default(%x, [1, 0])
        %r: f32[2, 2, b] = aten.reshape.default(%t, [2, 2, b])
        %e: f32[2, 2, b] = aten.exp.default(%r)
        %f: f32[2, 2, b] = aten.mul.Tensor(%e, %j)
        backward %t_again: f32[4, b] = aten.permute.default(%x, [1, 0])
        backward %r_again: f32[2, 2, b] = aten.reshape.default(%t_again, [2, 2, b])
        backward %m: f32[2, 2, b] = aten.mul.Tensor(%r_again, %e)
        backward %i_again: i64[4] = aten.arange.default(4)
        backward %j_again: i64[4] = aten.mul.Tensor(%i_again, 2)
        backward %n: f32[2, 2, b] = aten.mul.Tensor(%m, %j_again)
        backward %o: f32[4, b] = aten.mul.Tensor(%t_again, %n)
        return output "0" = %f
        return gradient "w" = %o
        """,
    )


def test_remove_dead() -> None:
    text = """graph(b=2)
        %x: f32[b] = input("x")
        %used: f32[2] = constant("used")
        %left: f32[2] = constant("left")
        %dead: f32[2] = aten.neg.default(%left)
        %y: f32[2] = aten.neg.default(%used)
        return output "0" = %y
        """
    parsed = Graph.from_text(text)
    constants = {"used": torch.ones(2), "left": torch.zeros(2)}
    found = RemoveDead()(Graph(parsed.nodes, parsed.outputs, parsed.symbols, constants))
    assert [node.name for node in found] == ["x", "used", "y"]
    assert list(found.constants) == ["used"]


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
