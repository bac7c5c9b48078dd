"""Runs a graph as it is written, on one device: what every other way of running it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, TensorType, Value, map_arg
from autopar.ops.masked import LOCAL_OPS, layout_for

Results = dict[tuple[str, str], torch.Tensor | None]


def interpret(
    graph: Graph, tensors: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor] | None = None
) -> Results:
    """``(kind, name) -> tensor`` of every output of a concrete ``graph``.

    ``tensors`` has every parameter, buffer and input by its target; a tangent that is not given is ones.
    Checks the type of every result on the way.
    """
    values: dict[Value, Any] = {}
    for node in graph.nodes:
        evaluate(node, graph, values, tensors, tangents)
    return {(o.kind, o.name): None if o.value is None else values[o.value] for o in graph.outputs}


def evaluate(
    node: Node,
    graph: Graph,
    values: dict[Value, Any],
    tensors: Mapping[str, torch.Tensor],
    tangents: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Adds the results of ``node`` to ``values``, which has those before it."""
    results = (_placeholder(node, graph, tensors, tangents or {}),) if node.is_placeholder else _call(node, values)
    assert len(results) == len(node.types), f"{node.op} returned {len(results)} results, typed {len(node.types)}"
    for index, (result, expected) in enumerate(zip(results, node.types, strict=True)):
        _check(node, result, expected)
        values[Value(node.name, index)] = result


def _placeholder(
    node: Node, graph: Graph, tensors: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if node.op == "constant":
        return graph.constants[node.name]
    if node.op == "tangent":
        return tangents.get(node.target, torch.ones([int(s) for s in node.type.shape], dtype=node.type.dtype))
    given = tensors[node.target].detach()
    return given if node.stored == node.type else given.to(node.type.dtype)


def _call(node: Node, values: Mapping[Value, Any]) -> tuple[Any, ...]:
    namespace, name, overload = node.op.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    layout = layout_for(node.op)
    if layout is not None:
        values = {value: LOCAL_OPS[layout](values[value]) for value in node.operands}
    args = map_arg(node.args, lambda leaf: _leaf(leaf, values))
    kwargs = {key: map_arg(arg, lambda leaf: _leaf(leaf, values)) for key, arg in node.kwargs}
    results = function(*args, **kwargs)
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _leaf(leaf: Arg, values: Mapping[Value, Any]) -> Any:
    assert not isinstance(leaf, sympy.Expr), f"{leaf} is symbolic: interpret graph.at(b=...)"
    return values[leaf] if isinstance(leaf, Value) else leaf


def _check(node: Node, result: Any, expected: TensorType | None) -> None:
    if expected is not None:
        assert isinstance(result, torch.Tensor), f"%{node.name} = {node.op} gave {type(result)}"
        found = TensorType(tuple(result.shape), result.dtype)
        assert found == expected, f"%{node.name} = {node.op} is {found}, typed {expected}"
