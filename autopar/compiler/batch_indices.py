"""Warns of an example batch with ids beyond a vocabulary, or labels beyond the classes.

Such a batch can be planned for, since a plan depends on shapes alone, but not trained on: a step would raise an
:class:`~autopar.errors.IndexRangeError`. Whoever plans on a laptop learns that long after.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, Value, map_arg
from autopar.ops.index_range import is_outside
from autopar.passes.base import is_pure
from autopar.torch_internals.modes import without_dispatch_modes
from autopar.torch_internals.operators import operation_called

# Operations that look rows or elements up: which argument is the index, and which says along which dim (the first, if
# none does).
_LOOKUPS: Mapping[str, tuple[int, int | None]] = {
    "aten.embedding.default": (1, None),
    "aten.gather.default": (2, 1),
    "aten.index_select.default": (2, 1),
}
# Elements of a value up to which indices are computed from a batch. Chosen: a moment's work.
_MOST = 1 << 24


def warn_of_indices(graph: Graph, inputs: Mapping[str, Tensor]) -> None:
    """Warns of each look-up of forward, in ``graph``, whose index is computed from ``inputs`` (by name) and constants
    alone, and is out of range. Inputs without values, and those on other devices than CPUs, are not read."""
    known = {name: x for name, x in inputs.items() if type(x) is Tensor and x.device.type == "cpu"}
    if any(not x.is_floating_point() for x in known.values()):
        with without_dispatch_modes(), torch.no_grad():
            for said in dict.fromkeys(_outside(graph.at(), known)):
                warnings.warn(said, stacklevel=2)


def _outside(graph: Graph, inputs: Mapping[str, Tensor]) -> Iterator[str]:
    values, decided = _Values(graph, inputs), _decided(graph, inputs)
    for node in graph.nodes:
        index_at, dim_at = _LOOKUPS.get(node.op, (0, None))
        if index_at and node.phase == "forward" and node.args[index_at].node in decided:
            shape = graph.type_of(node.args[0]).shape
            size = int(shape[0 if dim_at is None else node.args[dim_at]]) if shape else 1
            try:
                index = values[node.args[index_at]]
                if is_outside(index, 0, size):
                    least, most = map(int, torch.aminmax(index))
                    yield _said(graph, node, most if most >= size else least, size)
            except (RuntimeError, TypeError, IndexError, ValueError):
                continue


def _said(graph: Graph, node: Node, value: int, size: int) -> str:
    needed = graph.needed_for([node.args[_LOOKUPS[node.op][0]]])
    names = " and ".join(repr(each.target) for each in graph.placeholders("input") if each.name in needed)
    table = graph[node.args[0].node]
    what = f"{table.target} has {size} rows" if table.op == "param" else f"{size} classes or positions are known"
    return (
        f"the example batch does not fit the model: {node.module or 'forward or the loss'} looks up index {value} of "
        f"the input {names}, but {what}. The plan is made for its shapes; a step with it raises an IndexRangeError"
    )


def _decided(graph: Graph, inputs: Mapping[str, Tensor]) -> set[str]:
    """The nodes that ``inputs`` and constants decide, small ones."""
    decided: set[str] = set()
    for node in graph.nodes:
        if node.is_placeholder:
            constant = graph.constants.get(node.name)
            has_values = type(constant) is Tensor and not constant.is_meta
            is_decided = node.target in inputs if node.op == "input" else has_values
        else:
            is_small = all(kind is None or int(kind.numel) <= _MOST for kind in node.types)
            is_decided = is_small and is_pure(node.op) and all(value.node in decided for value in node.operands)
        if is_decided:
            decided.add(node.name)
    return decided


class _Values:
    """The values of a concrete graph's :func:`_decided` nodes, each computed once."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Tensor]) -> None:
        self.graph, self.inputs, self.known = graph, inputs, dict[Value, Any]()

    def __getitem__(self, value: Value) -> Tensor:
        if value not in self.known:
            self._compute(self.graph[value.node])
        found: Tensor = self.known[value]
        return found

    def _compute(self, node: Node) -> None:
        if node.is_placeholder:
            found = self.inputs[node.target] if node.op == "input" else self.graph.constants[node.name]
            self.known[Value(node.name)] = found.detach().cpu()
            return
        operation = operation_called(node.op)
        assert operation is not None
        kwargs = {key: map_arg(arg, self._leaf) for key, arg in node.kwargs}
        results = operation(*map_arg(node.args, self._leaf), **kwargs)
        several = results if isinstance(results, (tuple, list)) else (results,)
        self.known |= {Value(node.name, at): result for at, result in enumerate(several)}

    def _leaf(self, arg: Arg) -> Any:
        if isinstance(arg, Value):
            return self[arg]
        return torch.device("cpu") if isinstance(arg, torch.device) else arg
