"""Tests for the text of graphs of equal layers, whose lines differ in names alone."""

import pytest

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import print_node

# In pairs: what of two lines is told apart, and what is not.
LINES = """
graph(b=8)
%x: f32[b, 4] = input("x")
%w: f32[4, 4] = param("0.w")
%w_1: f32[4, 4] = param("1.w")
%m: f32[b, 4] = aten.mm.default(%x, %w)  @layers.0
%m_1: f32[b, 4] = aten.mm.default(%m, %w_1)  @layers.1
%m_2: f32[b, 4] = aten.mm.default(%m_1, %w_1)
%twice: f32[b, 4] = aten.mul.Tensor(%m, %m)  @layers.0
%both: f32[b, 4] = aten.mul.Tensor(%m, %m_1)  @layers.1
%again: f32[b, 4] = aten.mul.Tensor(%m_1, %m_1)  @layers.1
%s: f32[b, 2], %s.1: f32[b, 2] = aten.split.Tensor(%m, 2, 1)
%s_1: f32[b, 2], %s_1.1: f32[b, 2] = aten.split.Tensor(%m_1, 2, 1)
%c: f32[b, 4] = aten.cat.default([%s.1, %s], 1)
%c_1: f32[b, 4] = aten.cat.default([%s_1.1, %s], 1)
%c_2: f32[b, 4] = aten.cat.default([%s, %s_1.1], dim=1)
%k: f32[b, 4] = autopar.named(%m, "100%s of %x", b - 1, (1.0, -0.0))
%k_1: f32[b, 4] = autopar.named(%m_1, "100%s of %x", b - 1, (1.0, -0.0))
%k_2: f32[b, 4] = autopar.named(%m_1, "100%s of %m", b - 1, (1, -0.0))
%e: f32[b, 4], %e.1: none = autopar.pair(%m)
%e_1: f32[b, 4], %e_1.1: f32[b] = autopar.pair(%m)
backward %g: f32[b, 4] = aten.mul.Tensor(%m, %m)
return output "0" = %g
"""


def test_each_line_is_read_and_printed_as_it_is_alone() -> None:
    graph = Graph.from_text(LINES)
    lines = graph.to_text().splitlines()[1:-1]
    assert lines == [print_node(node) for node in graph.nodes]
    for node, line in zip(graph.nodes, lines, strict=True):
        operands = [print_node(graph[name]) for name in dict.fromkeys(value.node for value in node.operands)]
        taken = [text.partition(" = ")[0].removeprefix("backward ") for text in operands]
        inputs = [f'{results} = input("{number}")' for number, results in enumerate(taken)]
        alone = Graph.from_text("\n".join(["graph(b=8)", *inputs, line])).nodes[-1]
        assert (alone, alone.form, alone.is_symbolic) == (node, node.form, node.is_symbolic)
    assert Graph.from_text(graph.to_text()) == graph


def test_forms_of_lines_tell_apart_which_operands_are_one() -> None:
    graph = Graph.from_text(LINES)
    forms = {name: graph[name].form for name in ("twice", "both", "again", "k", "k_1", "k_2")}
    assert forms["twice"] == forms["again"] != forms["both"]
    assert forms["k"] == forms["k_1"] != forms["k_2"]


@pytest.mark.parametrize("argument", ["%x%y", "%x=1", "VALUE_0_x", "VALUE_0_w, %x=1"])
def test_what_is_no_operand_is_read_as_it_is_alone(argument: str) -> None:
    """A value may stand where Python has a name; an error is of this library."""

    def read(*names: str) -> object:
        placeholders = [f'%{name}: f32[4] = input("{name}")' for name in ("x", "y", "w")]
        lines = [f"%{name}: f32[4] = aten.relu.default({text})" for name, text in zip(("a", "b"), names, strict=False)]
        try:
            graph = Graph.from_text("\n".join(["graph()", *placeholders, *lines, 'return output "0" = %x']))
        except GraphError as error:
            return str(error)
        return graph.nodes[-1].args, graph.nodes[-1].kwargs

    other = argument.replace("%x", "%y")
    assert read(argument, other) == (read(other) if isinstance(read(other), tuple) else read(argument))
