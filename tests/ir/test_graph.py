"""The graph and its text form."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import print_node
from autopar.ir.node import Node, Output, TensorType, Value, map_arg, symbol
from autopar.ir.program import Instruction, Section

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


CONSTANTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
)


@given(CONSTANTS, st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
@example((-0.0, -5e-324, 1, True, 1.0, -(2**70), complex(-0.0, float("nan"))), "a b")
@example(("a %x", '"', "'", "\\", "\n", "\u2028", "é", '"  @a', ")  @b", "  like %x", " = %x"), "é")
@example('"  @', "a)")
def test_constants_round_trip(constant: Any, module: str) -> None:
    """``repr`` tells -0.0 from 0.0, True from 1, and finds each nan equal."""
    x = Node("x", "input", ("x",), types=(TensorType((2,), torch.float32),))
    y = Node("y", "aten.a.b", (Value("x"), constant), (("k", constant),), x.types, module)
    graph = Graph((x, y), (Output("output", str(constant), Value("y")),))
    found = Graph.from_text(graph.to_text())
    assert repr((found.nodes, found.outputs)) == repr((graph.nodes, graph.outputs))
    annotated = Graph.from_text(graph.annotated(classes={"y": "x"}).to_text(annotated=True))
    assert repr(annotated.nodes) == repr(graph.nodes) and annotated.classes == {"y": "x"}
    section = Section("forward", ("x",), (Instruction("y", y.op, y.args, y.kwargs, 1, module),), (Value("y"),))
    assert repr(Section.from_text(section.to_text())) == repr(section)


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


ANNOTATED = """graph(b=8)
%w: f32[4, 4] = param("w")  like %w
  | -> (R,R)
  | -> (S(0),P(sum))
%x: f32[b, 4] = input("x")
%y: f32[b, 4] = aten.mm.default(%x, %w)  @layers.1  like %w
  | (R,S(1/3)) (S(0),R) -> (P(max),R) [masked]
backward %z: f32[b, 4] = aten.neg.default(%y)  like %y
  | (R,R) -> (R,R)
return output "0" = %y
"""


def test_annotations_round_trip_and_are_left_out_unless_asked_for() -> None:
    graph = Graph.from_text(ANNOTATED)
    assert graph.to_text(annotated=True) == ANNOTATED
    assert graph.classes == {"w": "w", "y": "w", "z": "y"}
    assert graph.strategies["y"][0].local == "masked" and "x" not in graph.strategies
    plain = graph.to_text()
    assert "like" not in plain and "|" not in plain
    assert Graph.from_text(plain) == graph and not Graph.from_text(plain).strategies


ILL_TYPED = """graph(b=8)
%w: f32[4, 2] = param("w")
%h: bf16[4, 2] = param("h", stored=torch.float32)
%x: f32[b, 4] = input("x")
%d: i64[4, 2] = constant("d")
%m: i64[] = buffer("m")
%y: f32[4, 4], %y.1: none = aten.mm.default(%w, %w)
{line}
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('return gradient "w" = %y', r"the gradient 'w' is %y: f32\[4, 4\], but %w is f32\[4, 2\]"),
        ('return gradient "h" = %d', r"the gradient 'h' is %d: i64\[4, 2\], but %h is f32\[4, 2\]"),
        ('return input_gradient "x" = %m', r"the input_gradient 'x' is %m: i64\[\], but %x is f32\[b, 4\]"),
        ('return mutation "m" = %w', r"the mutation 'm' is %w"),
        ('return output "0" = %y.1', r"the output '0' is %y.1, which is not a tensor"),
        ('return output "0" = %y.2', r"the output '0' is %y.2, which is not a tensor"),
        ("%z: f32[4, 4] = aten.neg.default(%y.1)", r"%z uses %y.1, but that result of aten.mm.default is not a tensor"),
        ("%z: f32[4, 2] = autopar.saved(%y)", r"%z saves an activation of type f32\[4, 2\], but %y is f32\[4, 4\]"),
        (
            "backward %g: f32[4, 4] = aten.neg.default(%y)\n%z: f32[4, 4] = aten.neg.default(%g)",
            "%z = aten.neg.default is of the forward phase and uses %g of the backward phase",
        ),
    ],
)
def test_types_and_phases_are_verified(line: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Graph.from_text(ILL_TYPED.format(line=line))


def test_a_gradient_may_have_another_floating_dtype() -> None:
    """It is cast when it is accumulated, as under fp16 with stages."""
    Graph.from_text(ILL_TYPED.format(line='return gradient "h" = %h'))


def test_sizes_that_may_be_equal_are_let_through() -> None:
    graph = Graph.from_text(ILL_TYPED.format(line='return mutation "m" = none'))
    text = graph.to_text().replace("%y: f32[4, 4]", "%y: f32[b, 2]").replace("mutation", "gradient")
    assert Graph.from_text(text.replace('"m" = none', '"w" = %y')).gradients["w"] == Value("y")


def test_other_annotations_keep_what_is_known_of_the_nodes() -> None:
    graph = Graph.from_text(TEXT)
    users, calls = graph.users, list[str]()

    def found() -> int:
        calls.append("found")
        return len(graph)

    assert graph.once("length", found) == graph.once("length", found) == len(graph)
    strategic = graph.annotated(strategies={"ids": ()})
    assert strategic.strategies == {"ids": ()} and strategic.users is users
    assert strategic.once("length", found) == len(graph)
    assert calls == ["found"]
    # What is found out may depend on classes.
    classes = {node.name: node.name for node in graph}
    classed = strategic.annotated(classes=classes)
    assert classed.classes is classes and classed.strategies == {"ids": ()} and classed.users is users
    classed.once("length", found)
    assert calls == ["found", "found"]
    assert not graph.strategies and not graph.classes


def test_graphs_of_other_nodes_know_nothing_yet() -> None:
    graph = Graph.from_text(TEXT)
    assert graph.once("length", lambda: len(graph)) == 4
    fewer = graph.at(b=4).without_dead()
    assert fewer.once("length", lambda: -1) == -1


def test_a_graph_of_which_everything_is_needed_stays_itself() -> None:
    graph = Graph.from_text(TEXT)
    assert graph.without_dead() is graph
    useless = Node("useless", "aten.neg.default", (Value("weight"),), types=graph["weight"].types)
    assert replace(graph, nodes=(*graph.nodes, useless)).without_dead() == graph


def test_a_node_of_other_sizes_has_the_form_that_it_had_unless_its_arguments_have_sizes() -> None:
    graph = Graph.from_text("""graph(b=8)
%x: f32[b, 4] = input("x")
%y: f32[b, 4] = aten.mul.Tensor(%x, %x)
%z: f32[4*b] = aten.reshape.default(%y, [4*b])
return output "0" = %z
""")
    known = {node.name: (node.form, node.is_symbolic) for node in graph}
    concrete = graph.at(b=2)
    assert all(is_symbolic for _, is_symbolic in known.values())
    assert not any(node.is_symbolic for node in concrete)
    assert concrete["y"].form is known["y"][0] and concrete["z"].form != known["z"][0]
    assert concrete.to_text() == Graph.from_text(concrete.to_text()).to_text()


@pytest.mark.parametrize(
    ("size", "factor", "message"),
    [
        ("f32[b/2]", "2.0", "a size, b/2, is 1.5"),
        ("f32[b - 4]", "2.0", "a size, b - 4, is -1"),
        ("f32[b]", "1/(b - 3)", "b=3: 1/.b - 3. is zoo"),
    ],
)
def test_sizes_that_a_graph_does_not_hold_for_are_refused(size: str, factor: str, message: str) -> None:
    graph = Graph.from_text(f"""graph(b=8)
%x: {size} = input("x")
%y: {size} = aten.mul.Tensor(%x, {factor})
return output "0" = %y
""")
    assert graph.at(b=8)["y"].type is not None
    with pytest.raises(GraphError, match=message):
        graph.at(b=3)


def test_forms_tell_numbers_and_repeated_operands_apart() -> None:
    x, y = Value("x"), Value("y")
    calls = [
        (x, 1),
        (x, 1.0),
        (x, True),
        (x, -0.0),
        (x, 0.0),
        (x, "1"),
        (x, (1,)),
        (x, y),
        (x, x),
        (x, "%0"),
        ((x,), 1),
    ]
    assert len({Node("z", "op", args).form for args in calls}) == len(calls)
    assert Node("z", "op", (x, (y, x))).form == Node("a", "op", (y, (x, y))).form
    assert Node("z", "op", (x,), (("k", y),)).form != Node("z", "op", (x, y)).form


def test_a_node_elsewhere_keeps_what_is_known_of_it() -> None:
    node = Node("z", "aten.neg.default", (Value("x"),), module="a")
    form, operands = node.form, node.operands
    other = node.named("y", "backward").inside("b")
    assert (other.name, other.phase, other.module) == ("y", "backward", "b")
    assert other.form is form and other.operands is operands
    assert node == Node("z", "aten.neg.default", (Value("x"),), module="a")


def test_a_value_is_a_leaf_of_arguments_though_it_is_a_tuple() -> None:
    x, y = Value("x"), Value("y", 1)
    node = Node("z", "aten.cat.default", ((x, (y, x)), 1), (("like", y),))
    assert node.operands == (x, y, x, y)
    assert map_arg(node.args, lambda leaf: leaf if isinstance(leaf, int) else str(leaf)) == (("%x", ("%y.1", "%x")), 1)
    assert print_node(node) == "%z: none = aten.cat.default([%x, [%y.1, %x]], 1, like=%y.1)"
    renamed = node.map_values(lambda value: Value(f"{value.node}_", value.index))
    assert renamed.args == ((Value("x_"), (Value("y_", 1), Value("x_"))), 1)
    assert renamed.kwargs == (("like", Value("y_", 1)),)


def test_a_copy_of_a_node_knows_whether_it_is_a_placeholder() -> None:
    node = Node("x", "input", ("x",), types=(TensorType((2,), torch.float32),))
    assert node.is_placeholder and pickle.loads(pickle.dumps(node)).is_placeholder
    changed = replace(node, op="aten.relu.default", args=(Value("y"),))
    assert not changed.is_placeholder and changed.operands == (Value("y"),)
    assert changed.form != node.form and replace(changed, op="input", args=("x",)) == node
