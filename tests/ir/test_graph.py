"""The graph and its text form."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.node import TensorType, Value, symbol

# ruff: noqa: E501
TEXT = """graph(b=8)
%weight: f32[16, 4] = param("embed.weight")
%ids: i64[b] = input("ids")
%out: f32[b, 4], %out.1: none = aten.embedding.default(%weight, %ids, [2*b, 3, -1], x=-0.5, dtype=torch.float32, device=device("cpu"), y=float("-inf"), z=None, flag=True, name="a b")  @embed
backward %grad: f32[16, 4] = aten.mul.Tensor(%weight, %weight)  @embed
return gradient "embed.weight" = %grad
return output "0" = %out
return output "1" = none
"""


def test_text_round_trips() -> None:
    graph = Graph.from_text(TEXT)
    assert graph.to_text() == TEXT
    assert Graph.from_text(graph.to_text()) == graph


def test_arguments_keep_their_types() -> None:
    node = Graph.from_text(TEXT)["out"]
    kwargs = dict(node.kwargs)
    assert node.args[2] == (2 * symbol("b"), 3, -1)
    assert kwargs["x"] == -0.5 and kwargs["dtype"] is torch.float32 and kwargs["device"] == torch.device("cpu")
    assert kwargs["y"] == float("-inf") and kwargs["z"] is None and kwargs["flag"] is True and kwargs["name"] == "a b"


def test_at_replaces_the_symbol_everywhere() -> None:
    concrete = Graph.from_text(TEXT).at(b=3)
    assert concrete.symbols == ()
    assert concrete["out"].args[2] == (6, 3, -1)
    assert concrete["out"].type == TensorType((3, 4), torch.float32)
    assert Graph.from_text(TEXT).at()["ids"].type.shape == (8,)


def test_one_tensor_twice_is_two_operands() -> None:
    graph = Graph.from_text(TEXT)
    assert graph["grad"].operands == (Value("weight"), Value("weight"))
    assert [index for _, index in graph.users[Value("weight")]] == [0, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('%x: f32[2] = input("x")', "starts with a line"),
        ("graph()\n%y: f32[2] = aten.neg.default(%x)", "before its definition"),
        ('graph()\n%x: f32[2] = input("x")\n%x: f32[2] = input("y")', "defined twice"),
        ('graph()\n%x: f32[2] = input("x")\n%y: f32[2] = aten.neg.default(%x.1)', "no such result"),
        ('graph()\n%x: q9[2] = input("x")', "unknown dtype"),
        ("graph()\nnonsense", "cannot read the line"),
        ('graph()\n%x: f32[2] = input("x", 3)', "takes one name"),
        ('graph()\n%x: f32[2] = input("x")\nreturn output "0" = %z', "not defined"),
    ],
)
def test_bad_text_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Graph.from_text(text)


def test_without_dead_keeps_placeholders() -> None:
    graph = Graph.from_text(TEXT + 'return mutation "m" = none\n')
    smaller = Graph(graph.nodes, tuple(o for o in graph.outputs if o.kind == "gradient"), graph.symbols).without_dead()
    assert [node.name for node in smaller] == ["weight", "ids", "grad"]


def test_str_counts() -> None:
    assert str(Graph.from_text(TEXT)) == "Graph with 2 operations (1 params, 1 inputs)"
