"""Reduces bf16 gradients in the parameter's dtype.

A product gives each device its part of a parameter's gradient in bf16, which autograd widens to the dtype of the
parameter. To add up parts before that would move half the bytes, but round every partial sum to 8 bits, the worse the
more devices there are; so the placement program is not offered it. Partial sums of activations are not meant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Partial

from autopar.ir.graph import Graph
from autopar.ir.node import VIEWS, Value
from autopar.ir.placements import Placements
from autopar.solver.problem import Floats

_PASSED_ON = VIEWS | {"aten._to_copy.default", "aten.add.Tensor"}


def full_precision_gradients(graph: Graph) -> frozenset[Value]:
    """The values of backward that become nothing but gradients of parameters, of more bits than they have."""
    bits = {value: graph.type_of(value).dtype.itemsize for value in graph.gradients.values()}
    kept = frozenset(o.value for o in graph.outputs if o.kind != "gradient" and o.value is not None)
    for node in reversed(graph.nodes):
        value = Value(node.name)
        users = [user for user, _ in graph.users.get(value, ())]
        passed = [bits.get(Value(user.name)) if user.op in _PASSED_ON else None for user in users]
        if node.phase == "backward" and value not in kept and passed and None not in passed:
            bits[value] = min(size for size in (*passed, bits.get(value)) if size is not None)
    return frozenset(value for value, size in bits.items() if graph.type_of(value).dtype.itemsize < size)


def forbid_reductions(cost: Floats, rows: Sequence[Placements | None], columns: Sequence[Placements | None]) -> Floats:
    """``cost`` [rows, columns] of reshards where what adds up partial sums is impossible, unless a row is left with
    nothing."""
    found = cost.copy()
    for index, row in enumerate(rows):
        summing = [i for i, column in enumerate(columns) if row and column and _adds_up(row, column)]
        if summing and np.isfinite(np.delete(cost[index], summing)).any():
            found[index, summing] = np.inf
    return found


def _adds_up(source: Placements, target: Placements) -> bool:
    return any(isinstance(s, Partial) and not isinstance(t, Partial) for s, t in zip(source, target, strict=True))
