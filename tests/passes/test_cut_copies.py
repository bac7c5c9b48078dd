"""Chunks whose backward has copies of operations of forward."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.staged_graph import Edge
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.microbatch import microbatch
from autopar.passes.pipeline.repeated import copies_in_backward
from tests.helpers.microbatches import run_microbatches
from tests.helpers.stage_run import check_staged, run_chunks
from tests.zoo.check import compare

# Two halves of a layer, whose second begins with a sum that backward computes again from its terms.
HALVES = """graph()
    %a: f32[4, 4] = param("a")
    %b: f32[4, 4] = param("b")
    %c: f32[4, 4] = param("c")
    %x: f32[2, 4] = input("x")
    %g: f32[2, 4] = tangent("0")
    %s: f32[2, 4] = aten.mm.default(%x, %a)  @h.0
    %h: f32[2, 4] = aten.mm.default(%s, %b)  @h.0
    %r: f32[2, 4] = aten.add.Tensor(%s, %h)  @h.0
    %n: f32[2, 4] = aten.mul.Tensor(%r, %r)  @h.0
    %y: f32[2, 4] = aten.mm.default(%n, %c)  @h.0
    backward %ct: f32[4, 4] = aten.permute.default(%c, [1, 0])
    backward %gn: f32[2, 4] = aten.mm.default(%g, %ct)
    backward %r_anew: f32[2, 4] = aten.add.Tensor(%s, %h)  @h.0
    backward %n_anew: f32[2, 4] = aten.mul.Tensor(%r_anew, %r_anew)  @h.0
    backward %nt: f32[4, 2] = aten.permute.default(%n_anew, [1, 0])
    backward %gc: f32[4, 4] = aten.mm.default(%nt, %g)
    backward %gr: f32[2, 4] = aten.mul.Tensor(%gn, %r_anew)
    backward %st: f32[4, 2] = aten.permute.default(%s, [1, 0])
    backward %gb: f32[4, 4] = aten.mm.default(%st, %gr)
    backward %bt: f32[4, 4] = aten.permute.default(%b, [1, 0])
    backward %gh: f32[2, 4] = aten.mm.default(%gr, %bt)
    backward %gs: f32[2, 4] = aten.add.Tensor(%gr, %gh)
    backward %xt: f32[4, 2] = aten.permute.default(%x, [1, 0])
    backward %ga: f32[4, 4] = aten.mm.default(%xt, %gs)
    return output "0" = %y
    return gradient "a" = %ga
    return gradient "b" = %gb
    return gradient "c" = %gc
"""


def _names(graph: Graph) -> list[str]:
    return [node.name for node in graph]


def test_a_chunk_reads_what_it_receives_instead_of_computing_it_again() -> None:
    graph = Graph.from_text(HALVES)
    staged = cut(graph, ("n",))
    check_staged(staged, graph)
    assert staged.edges == (Edge(0, 1, "r"), Edge(1, 0, "gn")), "the terms of the sum are not sent"
    first, second = (_names(chunk) for chunk in staged.chunks)
    assert "n_anew_at1" in second and not any(name.startswith("r_anew") for name in second)
    assert "r_anew_at0" in first
    values = {name: torch.randn(4, 4) for name in "abc"} | {"x": torch.randn(2, 4)}
    whole = run_microbatches(microbatch(graph, 1), values)
    compare(run_chunks(staged, values), whole, "chunks", 1e-6)


def test_a_chunk_that_computes_a_value_computes_it_again() -> None:
    first, second = cut(Graph.from_text(HALVES), ("y",)).chunks
    assert "r_anew_at0" in _names(first) and not any(name.startswith("r_anew") for name in _names(second))


def test_operations_of_equal_numbers_that_compute_something_else_are_no_copies() -> None:
    graph = Graph.from_text("""graph()
        %x: f32[4] = input("x")
        %g: f32[4] = tangent("0")
        %w: f32[4] = param("w")
        %s: f32[4] = aten.mul.Tensor(%x, %w)
        %i: i64[4] = aten.argsort.default(%s)
        %a: f32[4] = aten.copysign.Scalar(%s, 0.0)
        %b: i64[4] = aten.mul.Tensor(%i, 2)
        %y: f32[4] = aten.add.Tensor(%a, %b)
        backward %same: f32[4] = aten.copysign.Scalar(%s, 0.0)
        backward %minus: f32[4] = aten.copysign.Scalar(%s, 0.0)
        backward %real: f32[4] = aten.mul.Tensor(%i, 2.0)
        backward %r: f32[4] = aten.mul.Tensor(%g, %minus)
        return output "0" = %y
        return gradient "w" = %r
    """)
    other = replace(graph["minus"], args=(Value("s"), -0.0))
    graph = replace(graph, nodes=tuple(other if node.name == "minus" else node for node in graph))
    assert copies_in_backward(graph) == {"same": "a"}
