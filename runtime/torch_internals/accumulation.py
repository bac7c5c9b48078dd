"""How autograd accumulates gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def accumulating(nodes: Sequence[Any]) -> list[bool]:
    """For each of these ``AccumulateGrad`` nodes (None: of what requires no gradient) whether the backward pass that is
    running adds to ``.grad`` there. All are False under ``torch.autograd.grad``, and under ``detect_anomaly``, which
    looks at the gradients. Relies on ``torch._C._will_engine_execute_node``, which raises for a node whose gradient is
    to be returned (2.11)."""
    if torch.is_anomaly_enabled():
        return [False] * len(nodes)
    try:
        return [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
    except RuntimeError:
        return [False] * len(nodes)
