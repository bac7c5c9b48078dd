"""Bytes that live through a step: weights, gradients, optimizer state, and what must stay free.

State is counted as torch's optimizers allocate it: in the dtype of the parameter, scalars left out. Gradients
have the dtype of their parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autopar.cluster import Cluster
from autopar.errors import OptionsError
from autopar.graph import Dim, TensorType

Shape = tuple[Dim, ...]


def _elements(shape: Shape) -> Dim:
    return math.prod(shape)


def _factored(shape: Shape) -> Dim:
    """Adafactor keeps a row and a column of second moments per matrix, and the whole of a vector's."""
    if len(shape) < 2:
        return _elements(shape)
    return _elements(shape[:-1]) + _elements((*shape[:-2], shape[-1]))


def _copies(count: int) -> Callable[[Shape], Dim]:
    return lambda shape: count * _elements(shape)


# Elements of state per parameter of a shape.
OPTIMIZERS: Mapping[str, Callable[[Shape], Dim]] = {
    "none": _copies(0),
    "sgd": _copies(0),
    "momentum": _copies(1),
    "sgd_momentum": _copies(1),
    "adam": _copies(2),
    "adamw": _copies(2),
    "amsgrad": _copies(3),
    "adamax": _copies(2),
    "nadam": _copies(2),
    "radam": _copies(2),
    "sparseadam": _copies(2),
    "adagrad": _copies(1),
    "adadelta": _copies(2),
    "adafactor": _factored,
    "asgd": _copies(1),
    "rmsprop": _copies(1),
    "rprop": _copies(2),
    "lion": _copies(1),
    "muon": _copies(1),
}


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one parameter, as it is stored."""

    weight: Dim
    gradient: Dim
    optimizer: Dim

    @property
    def total(self) -> Dim:
        return self.weight + self.gradient + self.optimizer


def optimizer_bytes(optimizer: str, parameter: TensorType) -> Dim:
    """Bytes of state that ``optimizer`` keeps for a (local or global) parameter.

    ``optimizer`` is a name in :data:`OPTIMIZERS`; capitals, spaces and dashes do not matter. Raises
    :class:`OptionsError`.
    """
    name = optimizer.lower().replace("-", "_").replace(" ", "_")
    if name not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        raise OptionsError(f"unknown optimizer {optimizer!r}: its bytes of state are not known; one of {known}")
    return OPTIMIZERS[name](parameter.shape) * parameter.dtype.itemsize


def parameter_bytes(optimizer: str, parameter: TensorType, *, trained: bool = True) -> ParameterBytes:
    """What a (local or global) parameter keeps on a device through a step; one that is not ``trained`` only
    its weight."""
    if not trained:
        return ParameterBytes(parameter.bytes, 0, 0)
    return ParameterBytes(parameter.bytes, parameter.bytes, optimizer_bytes(optimizer, parameter))


def state_bytes_per_element(optimizer: str, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of state per element of a large vector: 8 for AdamW in f32."""
    return int(optimizer_bytes(optimizer, TensorType((1,), dtype)))


def reserve(cluster: Cluster) -> int:
    """Bytes of a device's memory that a plan leaves free: contexts and buffers of libraries, and
    fragmentation."""
    device = cluster.device
    return device.reserve_bytes + math.ceil(device.reserve_fraction * device.memory_bytes)


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of a device's memory that a plan may use. Raises :class:`OptionsError` if the reserve leaves
    none."""
    left = cluster.device.memory_bytes - reserve(cluster)
    if left <= 0:
        raise OptionsError(
            f"cluster {cluster.name!r} reserves {reserve(cluster)} of {cluster.device.memory_bytes} bytes; "
            "lower its reserve_bytes"
        )
    return left
