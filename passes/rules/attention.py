"""Scaled dot-product attention in every ATen form: batch and head dims can be sharded, and in many the sequence.

Each row of the table lists the kinds of operands, in the order of the schema, and of results:

=========  ============================================================================
``q``      [B, H, L, ...]: query, output, log-sum-exp and their gradients
``k``      [B, Hkv, S, ...]: key, value and their gradients
``m``      an additive mask (or its gradient) that broadcasts to [B, H, L, S]
``.``      anything that is the same on every device: seeds, sequence offsets
=========  ============================================================================

With fewer key heads than query heads (grouped queries) heads can be sharded only if both divide. Dropout draws numbers
by position in the tensor, so with it there are no strategies.

*Context parallelism* shards the queries along the sequence; every device has all keys and values, and computes a
Partial(sum) of their gradients. A causal mask counts from the first query, so there the local operations of
:mod:`autopar.ops.attention` are used, which know where the queries of the device begin. Not every kernel returns
log-sum-exps with the layout of its queries (the memory-efficient one pads them), so not every form supports this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.node import TensorType
from autopar.ir.placements import AxisStrategy, Placement
from autopar.passes.rule_language.claims import P, R, S, claim, claim_rule
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, Operand, localiser


@dataclass(frozen=True, slots=True)
class Attention:
    """A form of attention. ``arguments[i]``: the kind of schema argument i (``-``: not a tensor); ``results[i]``: the
    kind of result i; ``dropout``, ``causal``: the positions of these options; ``sequence``: whether queries can be
    sharded along the sequence."""

    arguments: str
    results: str
    dropout: int
    named: Mapping[str, str]
    causal: int = 0
    sequence: bool = False


_MASK = {"attn_mask": "m", "attn_bias": "m"}
_FORMS = {
    "_scaled_dot_product_flash_attention_for_cpu": Attention("qkk--", "qq", 3, _MASK, 4, True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Attention("qqkkqq--", "qkk", 6, _MASK, 7, True),
    "_scaled_dot_product_flash_attention": Attention("qkk---", "qq..--...", 3, {}, 4, True),
    "_scaled_dot_product_flash_attention_backward": Attention("qqkkqq..----..", "qkk", 10, {}, 11, True),
    "_scaled_dot_product_efficient_attention": Attention("qkkm---", "qq..", 5, {}),
    "_scaled_dot_product_efficient_attention_backward": Attention("qqkkmqq..---", "qkkm", 9, {}),
    "_scaled_dot_product_cudnn_attention": Attention("qkkm----", "qq..--...", 5, {}),
    "_scaled_dot_product_cudnn_attention_backward": Attention("qqkkqq..m..----", "qkk", 13, {}),
    "_scaled_dot_product_fused_attention_overrideable": Attention("qkkm---", "qq..--...", 4, {}),
    "_scaled_dot_product_fused_attention_overrideable_backward": Attention("qqkkm-qq..----..", "qkkm", 12, {}),
    "_scaled_dot_product_attention_math": Attention("qkkm--m", "qq", 4, {"attn_mask": "m", "dropout_mask": "m"}),
}


def _kinds(call: OpCall, form: Attention) -> list[str]:
    """The kind of each operand."""
    kinds = {arg.index: kind for arg, kind in zip(call.args, form.arguments, strict=False) if isinstance(arg, Operand)}
    kinds |= {arg.index: form.named.get(name, ".") for name, arg in call.kwargs if isinstance(arg, Operand)}
    return [kinds[index] for index in range(len(call.inputs))]


def _place(tensor: TensorType | None, kind: str, dim: int, rank: int, broadcast: Placement) -> Placement:
    """The placement of ``tensor`` if dim ``dim`` (batch or heads) of the ``rank`` dims of the query is sharded;
    ``broadcast`` if it has length 1 there."""
    if tensor is None or kind == ".":
        return R
    own = dim if kind in "qk" else dim - rank + tensor.rank
    if own < 0 or (kind == "m" and tensor.shape[own] == 1):
        return broadcast
    return S(own)


def _is_shardable(call: OpCall, kinds: list[str], dim: int) -> bool:
    lengths = {int(t.shape[dim]) for t, kind in zip(call.inputs, kinds, strict=True) if kind in "qk"}
    return len(lengths) == 1 or all(length % call.size == 0 for length in lengths)


def _on_sequence(tensor: TensorType | None, kind: str, rank: int, of_keys: Placement) -> Placement:
    """The placement of ``tensor`` if queries are sharded along the sequence; ``of_keys`` if it is not sharded with
    them."""
    if tensor is None or kind == ".":
        return R
    own = rank - 2 if kind == "q" else rank - 2 - rank + tensor.rank
    if kind == "k" or own < 0 or (kind == "m" and tensor.shape[own] == 1):
        return of_keys
    return S(own)


def _context_parallel(call: OpCall, form: Attention, kinds: list[str], rank: int) -> Iterator[AxisStrategy]:
    causal = bool(call.arg(form.causal, "is_causal", False))
    if not form.sequence or (causal and "m" in kinds):
        return
    inputs = [_on_sequence(t, kind, rank, R) for t, kind in zip(call.inputs, kinds, strict=True)]
    outputs = [_on_sequence(t, kind, rank, P) for t, kind in zip(call.outputs, form.results, strict=True)]
    yield claim(call, dict(enumerate(inputs)), outputs, _local_name(call) if causal else "")


def _local_name(call: OpCall) -> str:
    return "autopar.causal_attention_backward" if "_backward" in call.op else "autopar.causal_attention"


@claim_rule(*(f"aten.{name}.default" for name in _FORMS))
def attention(call: OpCall) -> Iterator[AxisStrategy]:
    """See the module docstring."""
    form = _FORMS[call.op.split(".")[1]]
    if call.arg(form.dropout, "dropout_p", 0.0):
        return
    kinds = _kinds(call, form)
    rank = call.inputs[kinds.index("q")].rank
    for dim in range(rank - 2):
        if _is_shardable(call, kinds, dim):
            inputs = [_place(t, kind, dim, rank, R) for t, kind in zip(call.inputs, kinds, strict=True)]
            outputs = [_place(t, kind, dim, rank, P) for t, kind in zip(call.outputs, form.results, strict=True)]
            yield claim(call, dict(enumerate(inputs)), outputs)
    yield from _context_parallel(call, form, kinds, rank)


@localiser("autopar.causal_attention", "autopar.causal_attention_backward")
def local_causal(context: LocalContext) -> LocalCall:
    """The local operation, with the kernel's name, the offset of the local queries, the position of ``is_causal`` after
    the tensors that the local operation names, and the kernel's own arguments."""
    call, form = context.call, _FORMS[context.call.op.split(".")[1]]
    query = form.arguments.index("k") - 1
    start = context.input_offset(query, context.call.inputs[query].rank - 2)
    named = 6 if "_backward" in call.op else 3
    return _local_name(call), (call.op, start, form.causal - named, *call.args), call.kwargs
