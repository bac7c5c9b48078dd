"""Keys of equivalent nodes, which have the same strategies at the same prices.

The position that an operation indexes is not part of the key: strategies and prices depend on the dim and on sizes,
which types have. The steps of an unrolled loop differ only in positions.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, TensorType, Value, map_arg
from autopar.ops.random import DRAWS

# (x, dim, index) and (x, dim, start, end, step); backward and scatters have one more argument before these.
_PLACES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("aten.select.int", "aten.select_copy.int"), (2,)),
        **dict.fromkeys(("aten.select_backward.default", "aten.select_scatter.default"), (3,)),
        **dict.fromkeys(("aten.slice.Tensor", "aten.slice_copy.Tensor"), (2, 3)),
        **dict.fromkeys(("aten.slice_backward.default", "aten.slice_scatter.default"), (3, 4)),
    }
)


def without_positions(op: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """The arguments of a call of ``op``, with None in place of positions.

    >>> without_positions("aten.select.int", ("x", 1, 7))
    ('x', 1, None)
    """
    places = _PLACES.get(op, ())
    return tuple(None if index in places else arg for index, arg in enumerate(args)) if places else args


class EquivalenceKeys:
    """Keys of the nodes of a graph, which are equal for two nodes with the same strategies at the same prices."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._numbers: dict[Hashable, int] = {}
        self._by_form: dict[Hashable, int] = {}
        self._graphs = [graph]  # Of which types are told apart by identity first.

    def on(self, graph: Graph) -> EquivalenceKeys:
        """Keys of the nodes of another graph, which may be compared with these."""
        other = EquivalenceKeys(graph)
        other._numbers, other._by_form, other._graphs = self._numbers, self._by_form, self._graphs
        other._graphs.append(graph)
        return other

    def of(self, node: Node, pattern: str) -> Hashable:
        """The key of ``node``; ``pattern``: its place in the model."""
        operands = [self.graph.type_of(value) for value in node.operands]
        form = (node.op, node.kwargs, self._learns(node)) if node.is_placeholder else node.form
        key = form, *map(id, operands), *map(id, node.types)
        if key not in self._by_form:
            # Forms of the same types are described once.
            described = self._learns(node), _description(node, tuple(operands))
            self._by_form[key] = self._numbers.setdefault(described, len(self._numbers))
        return pattern, node.phase, self._by_form[key]

    def _learns(self, node: Node) -> bool:
        """Whether a node is a parameter that gets a gradient: a frozen one has no state, and no update."""
        return node.op == "param" and node.target in self.graph.gradients


def _description(node: Node, operands: tuple[TensorType, ...]) -> Hashable:
    """What equivalent nodes share, but for their place."""

    def leaf(arg: Arg) -> Arg:
        return None if isinstance(arg, Value) else repr(arg)

    # The number of a random draw does not affect how it runs.
    kwargs = tuple((key, arg) for key, arg in node.kwargs if not (node.op in DRAWS and key == "place"))
    args = () if node.is_placeholder else map_arg(without_positions(node.op, node.args), leaf)
    return node.op, (args, map_arg(kwargs, leaf)), operands, node.types
