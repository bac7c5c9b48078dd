"""How a model is called and what it returns, seen from the flat list of tensors a graph knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.torch_internals.trees import TreeSpec


@dataclass(frozen=True)
class Signature:
    """The calling convention of a traced model.

    ``input_spec`` flattens ``(args, kwargs)``; ``input_names[i]`` names leaf i (``input_ids``, ``0``, ``labels.1``) if
    it is a tensor and thereby an ``input`` of the graph, and is None for a leaf that is not a tensor: its value, in
    ``constants[i]``, was fixed by the trace. ``output_spec`` rebuilds the model's own return type from its leaves: leaf
    i is graph output ``output_names[i]``, or, where that is None, ``output_constants[i]``. ``lost`` maps the names of
    outputs that are neither tensors nor constants (``past_key_values``) to their types; the output has None there.

    ``loss`` is the name of the scalar graph output that ``step`` differentiates (None if the model returns no loss).
    ``differentiable`` are the outputs the graph has a ``tangent`` for, in order. ``tied`` maps a parameter's (or
    buffer's) further names to the one the graph uses.
    """

    input_spec: TreeSpec
    input_names: tuple[str | None, ...]
    output_spec: TreeSpec
    output_names: tuple[str | None, ...]
    loss: str | None
    differentiable: tuple[str, ...]
    constants: Mapping[int, Any] = field(default_factory=dict)
    output_constants: Mapping[int, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    training: bool = True
    lost: Mapping[str, str] = field(default_factory=dict)
