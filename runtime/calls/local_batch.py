"""Converts a global batch to DTensors, of which each rank has the part that a compiled call reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.placements import shares_of
from autopar.runtime.inputs.rank_local import whole, whole_dtensor
from autopar.runtime.state.parameters import make_dtensor

from .pipeline_call import PipelineCall
from .programs import AnyCall


def as_parts(call: AnyCall, leaves: Sequence[Any]) -> list[Any]:
    """``leaves`` of ``call`` with tensors converted to such DTensors. A step in microbatches reads parts of every
    microbatch, so its DTensors are replicated, and so are those of rows in unequal shares, which no DTensor has."""
    if isinstance(call, PipelineCall):
        return [_whole(call, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    slots = {slot.target: slot for slot in call.program.placeholders if slot.kind == "input"}
    if any(any(map(shares_of, slot.placements)) for slot in slots.values()):
        return [_whole(call, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    parts = list(leaves)
    for index, name in enumerate(call.signature.input_names):
        if name in slots:
            parts[index] = make_dtensor(call.own_input(slots[name], leaves[index]), slots[name], call.groups)
    return parts


def _whole(call: AnyCall, leaf: torch.Tensor) -> DTensor:
    value = whole(leaf, call.groups) if isinstance(leaf, DTensor) else leaf.detach()
    return whole_dtensor(value.to(call.groups.device), call.groups)
