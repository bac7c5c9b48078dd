"""Decomposes batch norm under mixed precision: in float32 from the cast of its input to the cast of its result.

torch's own decompositions compute a part on the input as it is, and round the statistics that backward takes to 16 bits
where tensors are on a processor, which no kernel of torch does. In one wide dtype, forward and backward share the cast
and the distance from the mean, and what they compute is again a batch norm, which can be undone (``passes/native``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .registry import Decomposition, accumulating, aten

# Operations that take the input first, and give the result, statistics, and what torch notes besides.
FORWARD = (
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.cudnn_batch_norm,
)
BACKWARD = (aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward, aten.batch_norm_backward)


def in_float32(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """``table``, torch's decompositions of overloads, with those of :data:`FORWARD` in float32 for 16-bit inputs."""
    forward = {getattr(packet, name) for packet in FORWARD for name in packet.overloads()}
    return {op: _widened(how) if op in forward else how for op, how in table.items()}


def _widened(how: Callable[..., Any]) -> Decomposition:
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if accumulating(x.dtype) == x.dtype:
            return how(x, *args, **kwargs)
        result, *others = how(x.to(accumulating(x.dtype)), *args, **kwargs)
        return (result.to(x.dtype), *others)

    return decomposed
