"""Scaled dot-product attention: batch and head dims can be sharded, and the sequence of the queries.

Each row of the table names the operands, in order of the schema, and the results by how they follow the
heads:

=========  ============================================================================
``q``      [B, H, L, ...]: query, output, log-sum-exp and their gradients
``k``      [B, Hkv, S, ...]: key, value and their gradients
``m``      an additive mask (or its gradient) that broadcasts to [B, H, L, S]
=========  ============================================================================

With fewer key heads than query heads (grouped queries) heads can be sharded only if both divide.

*Context parallelism* shards the queries along the sequence; every device has all keys and values, and makes a
Partial(sum) of their gradients. A causal mask counts from the first query, so there the local operations of
:mod:`autopar.ops.attention` take over, which know where the queries of the device begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.node import TensorType
from autopar.ir.placements import AxisStrategy, Placement
from autopar.passes.rule_language.claims import P, R, S, claim, claim_rule
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, Operand, localiser


@dataclass(frozen=True, slots=True)
class Attention:
    """``arguments[i]`` is the kind of schema argument i, ``results[i]`` that of result i; ``causal`` is the position of
    ``is_causal``, ``local`` what runs on a shard of causal queries."""

    arguments: str
    results: str
    causal: int
    local: str


_MATH = "aten._scaled_dot_product_attention_math.default"
_FORMS = {
    "autopar.attention.default": Attention("qkkm", "qq", 4, "autopar.causal_attention"),
    "autopar.attention_backward.default": Attention("qqkkqqm", "qkk", 7, "autopar.causal_attention_backward"),
    _MATH: Attention("qkkm--m", "qq", 5, ""),
}


def _kinds(call: OpCall, form: Attention) -> list[str]:
    """The kind of each operand; masks are the only operands given by name."""
    kinds = {arg.index: kind for arg, kind in zip(call.args, form.arguments, strict=False) if isinstance(arg, Operand)}
    return [kinds.get(index, "m") for index in range(len(call.inputs))]


def _place(tensor: TensorType | None, kind: str, dim: int, rank: int, broadcast: Placement) -> Placement:
    """``tensor`` sharded along batch or head dim ``dim`` of the ``rank`` dims of the query; ``broadcast`` if
    it has length 1 there."""
    if tensor is None:
        return R
    own = dim if kind in "qk" else dim - rank + tensor.rank
    if own < 0 or (kind == "m" and tensor.shape[own] == 1):
        return broadcast
    return S(own)


def _is_shardable(call: OpCall, kinds: list[str], dim: int) -> bool:
    lengths = {int(t.shape[dim]) for t, kind in zip(call.inputs, kinds, strict=True) if kind in "qk"}
    return len(lengths) == 1 or all(length % call.size == 0 for length in lengths)


def _on_sequence(tensor: TensorType | None, kind: str, rank: int, of_keys: Placement) -> Placement:
    """``tensor`` where the queries are sharded along the sequence; ``of_keys`` if it does not follow them."""
    if tensor is None:
        return R
    own = rank - 2 if kind == "q" else rank - 2 - rank + tensor.rank
    if kind == "k" or own < 0 or (kind == "m" and tensor.shape[own] == 1):
        return of_keys
    return S(own)


def _context_parallel(call: OpCall, form: Attention, kinds: list[str], rank: int) -> Iterator[AxisStrategy]:
    causal = bool(call.arg(form.causal, "is_causal", False))
    if not form.local or (causal and "m" in kinds):
        return
    inputs = [_on_sequence(t, kind, rank, R) for t, kind in zip(call.inputs, kinds, strict=True)]
    outputs = [_on_sequence(t, kind, rank, P) for t, kind in zip(call.outputs, form.results, strict=True)]
    yield claim(call, dict(enumerate(inputs)), outputs, form.local if causal else "")


@claim_rule(*_FORMS)
def attention(call: OpCall) -> Iterator[AxisStrategy]:
    """See the module docstring."""
    form = _FORMS[call.op]
    if call.op == _MATH and call.arg(4, "dropout_p", 0.0):
        return  # Draws numbers by position in the tensor.
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
    """Where the queries of the device begin, then the tensors."""
    call, form = context.call, _FORMS[context.call.op]
    query = form.arguments.index("k") - 1
    start = context.input_offset(query, context.call.inputs[query].rank - 2)
    return form.local, (start, *call.args[: form.causal - 1]), call.kwargs
