"""What nodes have in common that do the same: they have the same strategies at the same prices.

Where in a tensor an operation looks is not part of it: strategies and prices depend on the dim, and on sizes, which
types have. The steps of a loop that a trace unrolls differ in just that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType

from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, Value, map_arg
from autopar.ops.random import DRAWS

# (x, dim, index) and (x, dim, start, end, step); backward, and what writes there, have one argument more before these.
_PLACES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("aten.select.int", "aten.select_copy.int"), (2,)),
        **dict.fromkeys(("aten.select_backward.default", "aten.select_scatter.default"), (3,)),
        **dict.fromkeys(("aten.slice.Tensor", "aten.slice_copy.Tensor"), (2, 3)),
        **dict.fromkeys(("aten.slice_backward.default", "aten.slice_scatter.default"), (3, 4)),
    }
)


def without_positions(op: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """The arguments of a call of ``op``, None in the place of those that say where it looks.

    >>> without_positions("aten.select.int", ("x", 1, 7))
    ('x', 1, None)
    """
    places = _PLACES.get(op, ())
    return tuple(None if index in places else arg for index, arg in enumerate(args)) if places else args


def equivalence_key(graph: Graph, node: Node, pattern: str) -> Hashable:
    """What must be equal for two nodes to have the same strategies at the same prices; ``pattern`` is where the node
    stands in the model."""

    def leaf(arg: Arg) -> Arg:
        return None if isinstance(arg, Value) else repr(arg)

    # Draws differ in their number, which is no concern of how they are run.
    kwargs = tuple((key, arg) for key, arg in node.kwargs if not (node.op in DRAWS and key == "place"))
    args = () if node.is_placeholder else map_arg(without_positions(node.op, node.args), leaf)
    operands = tuple(graph.type_of(value) for value in node.operands)
    return pattern, node.phase, node.op, (args, map_arg(kwargs, leaf)), operands, node.types
