"""Operations that torch chose for processors, as those of every device.

A model is traced on fake tensors of the processor, whatever it will run on. Where torch has one operation for each kind
of device, the graph has autopar's own (:mod:`autopar.ops.attention`).
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.ir.node import Arg

Options = tuple[tuple[str, Arg], ...]


class Operation(NamedTuple):
    """A call as a node of a graph has it; ``name`` is what to call the node."""

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: Options


# By the processor's operation: the neutral one, and how many tensors come before the probability of dropout.
_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": ("attention", 3),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": ("attention_backward", 6),
}


def neutral(operation: Operation) -> Operation:
    """``operation``, or the device-independent operation that computes the same."""
    if operation.op not in _ATTENTION:
        return operation
    name, tensors = _ATTENTION[operation.op]
    options = dict(operation.kwargs)
    given = operation.args[tensors:]
    dropout = given[0] if given else options.get("dropout_p", 0.0)
    causal = given[1] if len(given) > 1 else options.get("is_causal", False)
    if dropout:
        return operation  # Draws inside a kernel; the trace writes dropout out, so only a direct call gets here.
    mask, scale = options.get("attn_mask"), options.get("scale")
    optional = (mask, causal) if mask is not None or causal else ()
    return Operation(
        name,
        f"autopar.{name}.default",
        (*operation.args[:tensors], *optional),
        () if scale is None else (("scale", scale),),
    )
