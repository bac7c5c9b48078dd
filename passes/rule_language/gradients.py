"""What every backward operation has in common: it is linear in the gradients that it takes.

Most backward operations also take values of the samples, which cannot be parts of a sum. But those of a weight's own
computation (the norm of a weight-normalised weight, the layer norm of a table of positions) take nothing but parameters
beside the gradient, which may then be that of a part of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from autopar.ir.placements import PARTIAL_SUM, REPLICATE, AxisStrategy
from autopar.torch_internals.operators import OpOverload, schema_of

from .registry import OpCall, Operand


def linear_in_gradients(call: OpCall) -> Iterator[AxisStrategy]:
    """A backward operation of ATen on parts of its gradients, all other operands being whole: its results are parts
    too. ATen calls such operations ``..._backward``, and the arguments ``grad...``."""
    at = {
        argument.index
        for position, name in enumerate(_argument_names(call.op))
        if name.startswith("grad") and isinstance(argument := call.arg(position, name), Operand)
    }
    tensors = [*(call.inputs[index] for index in at), *(kind for kind in call.outputs if kind is not None)]
    if at and all(kind.dtype.is_floating_point or kind.dtype.is_complex for kind in tensors):
        inputs = tuple(PARTIAL_SUM if index in at else REPLICATE for index in range(len(call.inputs)))
        yield AxisStrategy(inputs, tuple(REPLICATE if kind is None else PARTIAL_SUM for kind in call.outputs))


@cache
def _argument_names(op: str) -> tuple[str, ...]:
    """The names of the arguments of a backward operation of ATen; none for other operations."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    if namespace != "aten" or "_backward" not in name:
        return ()
    operation = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(operation, OpOverload):
        return ()
    return tuple(argument.name for argument in schema_of(operation).arguments)
