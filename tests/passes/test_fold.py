"""Folding: nodes that play the same part in equal layers are in one class; text in, classes out."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.recompute.saved_values import save_activations

LAYERS = """graph()
%w0: f32[4, 4] = param("layers.0.fc.weight")
%w1: f32[4, 4] = param("layers.1.fc.weight")
%w2: f32[4, 8] = param("layers.2.fc.weight")
%x: f32[2, 4] = input("x")
%a: f32[2, 4] = aten.mm.default(%x, %w0)  @layers.0.fc
%b: f32[2, 4] = aten.mm.default(%a, %w1)  @layers.1.fc
%c: f32[2, 8] = aten.mm.default(%b, %w2)  @layers.2.fc
return output "0" = %c
"""


def test_equal_layers_share_a_class_and_a_wider_one_does_not() -> None:
    classes = fold_layers(Graph.from_text(LAYERS)).classes
    assert classes == {"w0": "w0", "w1": "w0", "w2": "w2", "x": "x", "a": "a", "b": "a", "c": "c"}


def test_stretches_of_depth_are_apart() -> None:
    classes = fold_layers(Graph.from_text(LAYERS), groups=3).classes
    assert all(name == representative for name, representative in classes.items())


def test_a_value_saved_for_backward_rests_once() -> None:
    graph = Graph.from_text("""graph()
%x: f32[2, 4] = input("x")
%t: f32[2, 4] = tangent("0")
%y: f32[2, 4] = aten.tanh.default(%x)
backward %g: f32[2, 4] = aten.tanh_backward.default(%t, %y)
backward %h: f32[2, 4] = aten.mul.Tensor(%g, %y)
return output "0" = %y
return input_gradient "x" = %h
""")
    rested = save_activations(graph)
    assert [node.name for node in rested.nodes if node.op == "autopar.rest"] == ["y_rest"]
    assert [value.node for value in rested["g"].operands] == ["t", "y_rest"]
    assert [value.node for value in rested["h"].operands] == ["g", "y_rest"]
    assert save_activations(rested) == rested
