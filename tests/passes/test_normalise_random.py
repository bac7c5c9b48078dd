"""Chains of operations drawn at random compute the same before and after they are normalised."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.graph import Graph
from autopar.passes.normalise.standard import normalise
from tests.helpers.interpret import interpret

SMALL = st.integers(-2, 2)


@st.composite
def calls(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, list[Any]]:
    """An operation and what follows its first operand, of ``shape``; many hardly change anything."""
    rank = len(shape)
    dim = draw(st.integers(0, rank - 1))
    size = shape[dim]
    start = draw(st.integers(-size, size - 1))
    unequal = draw(st.lists(SMALL, min_size=2, max_size=2)) * draw(st.integers(1, rank))
    shift = draw(SMALL)
    choices: list[tuple[str, list[Any]]] = [
        ("constant_pad_nd.default", [[max(amount, 1 - min(shape)) for amount in unequal[:2]]]),
        ("constant_pad_nd.default", [[0] * 2 * (rank - 1 - dim) + [shift, -shift]]),
        ("slice.Tensor", [dim, start, draw(st.sampled_from([size, 1 << 62, -1, size - 1])), draw(st.integers(1, 2))]),
        ("permute.default", [draw(st.permutations(range(rank)))]),
        ("reshape.default", [draw(st.sampled_from([list(shape), [-1], [1, *shape], list(shape[::-1])]))]),
        ("transpose.int", [dim, draw(st.integers(0, rank - 1))]),
        ("unsqueeze.default", [dim]),
        ("squeeze.default", []),
        ("expand.default", [[2, *shape]]),
        ("repeat.default", [[1] * (rank - 1) + [draw(st.integers(1, 2))]]),
        ("roll.default", [[shift], [dim]]),
        ("flip.default", [[dim]]),
        ("clone.default", []),
        ("slice_backward.default", [[*shape[:dim], size + 1, *shape[dim + 1 :]], dim, shift % 2, shift % 2 + size, 1]),
        ("mul.Tensor", [draw(st.sampled_from([0.0, 1.0, 2.0]))]),
        ("add.Tensor", [draw(st.sampled_from([0.0, 1.0]))]),
        ("div.Tensor", [1.0]),
        ("pow.Tensor_Scalar", [draw(st.sampled_from([1, 2]))]),
    ]
    return draw(st.sampled_from(choices))


def _result(op: str, x: torch.Tensor, args: list[Any]) -> torch.Tensor | None:
    name, overload = op.split(".")
    try:
        found = getattr(getattr(torch.ops.aten, name), overload)(x, *args)
    except RuntimeError:
        return None
    return found if 0 < found.numel() < 500 and 0 < found.ndim < 6 else None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chains_mean_the_same(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    value = x = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    lines = [f'%v0: f32{shape} = input("x")']
    for _ in range(data.draw(st.integers(1, 6))):
        op, args = data.draw(calls(tuple(value.shape)))
        found = _result(op, value, args)
        if found is None:
            continue
        given_args = ", ".join([f"%v{len(lines) - 1}", *map(str, args)])
        lines.append(f"%v{len(lines)}: f32{list(found.shape)} = aten.{op}({given_args})")
        value = found
    lines.append(f'return output "0" = %v{len(lines) - 1}')
    graph = Graph.from_text("graph()\n" + "\n".join(lines))
    before, after = interpret(graph, {"x": x}), interpret(normalise(graph), {"x": x})
    torch.testing.assert_close(before["output", "0"], value, rtol=0, atol=0)
    torch.testing.assert_close(after["output", "0"], value, rtol=0, atol=0)
