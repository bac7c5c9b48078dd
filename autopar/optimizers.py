"""The state of optimizers per parameter, as torch allocates it: in the dtype of the parameter, without scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopar.ir.node import Dim, TensorType

Shape = tuple[Dim, ...]


def _factored(shape: Shape) -> Dim:
    """Adafactor stores a row and a column of second moments for a matrix, and all moments of a vector."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1]))


def _copies(count: int) -> Callable[[Shape], Dim]:
    return lambda shape: count * math.prod(shape)


# The number of elements of state for a parameter of a shape, by the names that ``Options(optimizer=...)`` takes.
OPTIMIZERS: Mapping[str, Callable[[Shape], Dim]] = {
    "sgd": _copies(0),
    "momentum": _copies(1),
    "adam": _copies(2),
    "adamw": _copies(2),
    "amsgrad": _copies(3),
    "adamax": _copies(2),
    "nadam": _copies(2),
    "radam": _copies(2),
    "adagrad": _copies(1),
    "adadelta": _copies(2),
    "adafactor": _factored,
    "asgd": _copies(1),
    "rmsprop": _copies(1),
    "rprop": _copies(2),
    "lion": _copies(1),
    "muon": _copies(1),
}

# Optimizers of torch that update every element independently: their state may rest in host memory
# (:mod:`autopar.runtime.state.optimizer`).
ELEMENTWISE = frozenset(OPTIMIZERS) - {"adafactor", "lion", "muon"}


def optimizer_bytes(optimizer: str, parameter: TensorType) -> Dim:
    """Bytes of state for a parameter, or for the shard of one; ``optimizer`` is a name in :data:`OPTIMIZERS`."""
    return OPTIMIZERS[optimizer](parameter.shape) * parameter.dtype.itemsize
