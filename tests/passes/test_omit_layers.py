"""Layers of a deep stack are left out, and what read theirs reads those that are left; text in, text out."""

from __future__ import annotations

import pytest

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.annotate.omit_layers import OmitLayers, Stack, stacks_of
from tests.helpers.pass_text import check, printed


def deep(depth: int, *left_out: int, turns: int = 1) -> str:
    """Layers that add the product of what they read and a weight, which is of another size every ``turns``; the first
    reads nothing of another. Backward goes through them the other way."""
    layers = [i for i in range(depth) if i not in left_out]
    sizes = {i: 4 if i % turns == 0 else 6 for i in layers}
    lines = ["graph(b=8)", '%x: f32[b, 4] = input("x")']
    lines += [f'%w{i}: f32[4, {sizes[i]}] = param("h.{i}.fc.weight")' for i in layers]
    lines += [f'%v{i}: f32[{sizes[i]}, 4] = param("h.{i}.fd.weight")' for i in layers]
    before = "x"
    for i in layers:
        lines.append(f"%u{i}: f32[b, {sizes[i]}] = aten.mm.default(%{before}, %w{i})  @h.{i}.fc")
        lines.append(f"%y{i}: f32[b, 4] = aten.mm.default(%u{i}, %v{i})  @h.{i}.fd")
        before = f"y{i}"
    after = before
    for i in reversed(layers):
        lines.append(f"backward %d{i}: f32[b, 4] = aten.mul.Tensor(%{after}, %y{i})  @h.{i}.fd")
        lines.append(f"backward %t{i}: f32[4, b] = aten.permute.default(%d{i}, [1, 0])  @h.{i}.fd")
        lines.append(f"backward %g{i}: f32[4, {sizes[i]}] = aten.mm.default(%t{i}, %u{i})  @h.{i}.fd")
        after = f"d{i}"
    lines.append(f'return output "0" = %{before}')
    lines += [f'return gradient "h.{i}.fc.weight" = %g{i}' for i in layers]
    return "\n".join(lines)


def omitted(text: str, stack: Stack, begin: int, count: int) -> str:
    graph = OmitLayers(stack, begin, count)(fold_layers(Graph.from_text(text)))
    return Graph(graph.nodes, graph.outputs, graph.symbols).to_text()


def test_layers_of_the_middle_are_left_out_forward_and_backward() -> None:
    stack = Stack("h.", 6, 1, 0, 6)
    assert omitted(deep(6), stack, 2, 2) == Graph.from_text(deep(6, 2, 3)).to_text()


def test_layers_that_take_turns_are_left_out_in_turns() -> None:
    text = deep(8, turns=2)
    (stack,) = stacks_of(fold_layers(Graph.from_text(text)), 4)
    assert (stack.path, stack.depth, stack.period) == ("h.", 8, 2)
    assert omitted(text, stack, 2, 4) == Graph.from_text(deep(8, 2, 3, 4, 5, turns=2)).to_text()
    with pytest.raises(GraphError, match="no such node"):  # Half a turn leaves what does not fit together.
        printed(OmitLayers(Stack("h.", 8, 1, 0, 8), 2, 1)(fold_layers(Graph.from_text(text))))


def test_classes_are_named_by_what_is_left() -> None:
    before = """graph()
    %x: f32[4] = input("x")  like %x
    %a: f32[4] = aten.tanh.default(%x)  @h.0.act  like %a
    %b: f32[4] = aten.tanh.default(%a)  @h.1.act  like %a
    %c: f32[4] = aten.tanh.default(%b)  @h.2.act  like %a
    return output "0" = %c
    """
    after = """graph()
    %x: f32[4] = input("x")  like %x
    %b: f32[4] = aten.tanh.default(%x)  @h.1.act  like %b
    %c: f32[4] = aten.tanh.default(%b)  @h.2.act  like %b
    return output "0" = %c
    """
    # There is no layer as far from layer 1 as layer 0 was: the input is none.
    with pytest.raises(GraphError, match="no such node"):
        check(OmitLayers(Stack("h.", 3, 1, 0, 3), 0, 1), before, after)
    check(OmitLayers(Stack("h.", 3, 1, 0, 3), 1, 1), before, after.replace("%b", "%a").replace("h.1", "h.0"))


@pytest.mark.parametrize(
    ("before", "after", "repeats"),
    [
        ("", "", True),
        ("aten.mm.default(%y3, %w4)", "aten.mm.default(%x, %w4)", False),  # It reads what other layers do not read.
        ("aten.mm.default(%t5, %u5)", "aten.mm.default(%t5, %u4)", False),  # A value of it is read once more.
        ('"h.4.fc.weight" = %g4', '"h.4.fc.weight" = %g5', False),  # Another layer computes its gradient.
    ],
)
def test_layers_repeat_others_that_are_tied_alike(before: str, after: str, repeats: bool) -> None:
    text = deep(9)
    assert before in text
    graph = fold_layers(Graph.from_text(text.replace(before, after) if before else text))
    found = OmitLayers(Stack("h.", 9, 1, 0, 9), 3, 3).repeated(graph)
    assert found == (range(2, 3) if repeats else None)


def test_layers_repeat_others_in_turns() -> None:
    graph = fold_layers(Graph.from_text(deep(12, turns=2)))
    assert OmitLayers(Stack("h.", 12, 2, 0, 12), 4, 4).repeated(graph) == range(2, 4)


def test_layers_repeat_those_behind_where_those_before_are_tied_unlike() -> None:
    """Backward of layer 0 reads what others do not read of the layer behind them."""
    graph = fold_layers(
        Graph.from_text(deep(9).replace("%d0: f32[b, 4] = aten.mul.Tensor(%d1", "%d0: f32[b, 4] = aten.sub.Tensor(%d1"))
    )
    assert OmitLayers(Stack("h.", 9, 1, 1, 9), 2, 4).repeated(graph) == range(6, 7)


def test_what_is_read_outside_of_the_stack_is_not_left_out() -> None:
    text = deep(6).replace(
        'return output "0" = %y5', '%s: f32[b, 4] = aten.add.Tensor(%y3, %y5)\nreturn output "0" = %s'
    )
    with pytest.raises(GraphError, match=r"%s, outside of h\.\*, reads %y3 of layer 3"):
        omitted(text, Stack("h.", 6, 1, 0, 6), 2, 2)


def test_stacks_are_outermost_and_repeat() -> None:
    assert stacks_of(fold_layers(Graph.from_text(deep(6))), 7) == ()
    (stack,) = stacks_of(fold_layers(Graph.from_text(deep(6))), 4)
    assert (stack.path, stack.depth, stack.period) == ("h.", 6, 1)
    # One layer of another size ends what repeats.
    longest = deep(9).replace("%u2: f32[b, 4]", "%u2: f32[b, 6]").replace("%w2: f32[4, 4]", "%w2: f32[4, 6]")
    longest = longest.replace("%v2: f32[4, 4]", "%v2: f32[6, 4]").replace("%g2: f32[4, 4]", "%g2: f32[4, 6]")
    (stack,) = stacks_of(fold_layers(Graph.from_text(longest)), 4)
    assert stack.first == 3 and stack.last >= 8
    nested = deep(6).replace("h.", "part.0.h.")
    (stack,) = stacks_of(fold_layers(Graph.from_text(nested)), 4)
    assert stack.path == "part.0.h."
