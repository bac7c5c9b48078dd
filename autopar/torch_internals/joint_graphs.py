"""The joint forward and backward graph of AOTAutograd, and the metadata on nodes of torch.fx."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

# Descriptors: they say what each input and output of a joint graph is (2.11).
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._guards import TracingContext, tracing

# Traces a function as a graph of operators: `torch.fx.experimental.proxy_tensor.make_fx` (2.11).
from torch.fx.experimental.proxy_tensor import make_fx

# Nodes made inside it keep what `current_meta` holds: `preserve_node_meta` of torch.fx's traceback (2.11).
from torch.fx.traceback import preserve_node_meta

from .fake_tensors import FakeTensorMode

_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


__all__ = [
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "described_outputs",
    "descriptor_of",
    "export_joint",
    "load_tracer",
    "make_fx",
    "notes",
    "notes_of",
    "preserve_node_meta",
    "set_notes",
    "value_of",
]


def load_tracer() -> None:
    """Imports what torch traces with: AOTAutograd, which brings much of Inductor, and ``torch.export``, which names its
    own files. A trace from the cache does without. Relies on ``torch._functorch.aot_autograd`` (2.11)."""
    import torch._functorch.aot_autograd
    import torch.export._trace  # noqa: F401


def export_joint(
    mode: FakeTensorMode,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> torch.fx.GraphModule:
    """Traces forward and backward of ``module`` on fake ``inputs`` of ``mode`` as one graph, with a descriptor on each
    input and output. Relies on ``aot_export_joint_with_descriptors`` under a ``TracingContext`` (2.11)."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        return aot_export_joint_with_descriptors(
            stack, module, tuple(inputs), decompositions=dict(decompositions)
        ).graph_module


def notes() -> dict[str, Any] | None:
    """The metadata that nodes made now get under their key ``custom``; None for none. Relies on
    ``torch.fx.traceback.current_meta`` (2.11)."""
    return fx_traceback.current_meta.get("custom")


def notes_of(node: torch.fx.Node) -> dict[str, Any]:
    """The :func:`notes` at the time ``node`` was made. Relies on its ``meta["custom"]`` (2.11)."""
    custom: dict[str, Any] = node.meta.get("custom", {})
    return custom


def descriptor_of(placeholder: torch.fx.Node) -> Any:
    """The descriptor of an input of a joint graph; None for inputs of other graphs. Relies on ``meta["desc"]``
    (2.11)."""
    return placeholder.meta.get("desc")


def described_outputs(output: torch.fx.Node) -> list[tuple[torch.fx.Node | None, Any]]:
    """The results of a joint graph with their descriptors. Relies on the output's ``meta["desc"]`` (2.11)."""
    results: Any = output.args[0]
    return list(zip(results, output.meta["desc"], strict=True))


def value_of(node: torch.fx.Node, otherwise: Any = None) -> Any:
    """The fake tensor, or the number, that ``node`` gives; ``otherwise`` where torch records nothing. Relies on
    ``meta["val"]`` (2.11). In 2.11 the shape function of the CPU's attention declares its second result as float32,
    while the kernel gives float64 for float64."""
    value = node.meta.get("val", otherwise)
    if isinstance(value, (tuple, list)) and str(node.target) == _CPU_ATTENTION:
        out, logsumexp = value
        return out, logsumexp.double() if out.dtype == torch.float64 else logsumexp
    return value


def set_notes(custom: dict[str, Any] | None) -> None:
    """Sets what :func:`notes` returns. Relies on ``torch.fx.traceback.current_meta`` (2.11)."""
    if custom is None:
        fx_traceback.current_meta.pop("custom", None)
    else:
        fx_traceback.current_meta["custom"] = custom
