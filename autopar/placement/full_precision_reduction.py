"""Ensures that bf16 gradients are reduced in the parameter's dtype.

A product gives each device its part of a parameter's gradient in bf16, which autograd widens to the dtype of the
parameter. Summing the parts before that would move half the bytes, but it would round every partial sum to 8 bits, and
the error grows with the number of devices. So the placement program does not offer it. Partial sums of activations are
not affected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Partial

from autopar.ir.graph import Graph
from autopar.ir.node import CAST, VIEWS, Value
from autopar.ir.placements import Placements
from autopar.solver.problem import Floats

_PRESERVING = VIEWS | {CAST, "aten.add.Tensor"}


def full_precision_gradients(graph: Graph) -> frozenset[Value]:
    """The backward values that only become gradients of parameters, and have fewer bits than those gradients."""
    return graph.once(full_precision_gradients, lambda: _full_precision_gradients(graph))


def _full_precision_gradients(graph: Graph) -> frozenset[Value]:
    bits = {value: graph.type_of(value).dtype.itemsize for value in graph.gradients.values()}
    other_outputs = frozenset(o.value for o in graph.outputs if o.kind != "gradient" and o.value is not None)
    for node in reversed(graph.nodes):
        value = Value(node.name)
        users = [user for user, _ in graph.users.get(value, ())]
        user_bits = [bits.get(Value(user.name)) if user.op in _PRESERVING else None for user in users]
        if node.phase == "backward" and value not in other_outputs and user_bits and None not in user_bits:
            bits[value] = min(size for size in (*user_bits, bits.get(value)) if size is not None)
    return frozenset(value for value, size in bits.items() if graph.type_of(value).dtype.itemsize < size)


def forbid_reductions(cost: Floats, rows: Sequence[Placements | None], columns: Sequence[Placements | None]) -> Floats:
    """``cost`` [rows, columns] of reshards, with reshards that sum partial sums forbidden, unless that would leave a
    row without any."""
    restricted = cost.copy()
    for index, row in enumerate(rows):
        summing = [i for i, column in enumerate(columns) if row and column and _adds_up(row, column)]
        if summing and np.isfinite(np.delete(cost[index], summing)).any():
            restricted[index, summing] = np.inf
    return restricted


def _adds_up(source: Placements, target: Placements) -> bool:
    return any(isinstance(s, Partial) and not isinstance(t, Partial) for s, t in zip(source, target, strict=True))
