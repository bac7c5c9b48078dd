"""Grouped products: rows [S, K] in E consecutive groups, each with its own matrix of [E, K, N]; ``ends`` [E]: the ends
of the groups. Rows, groups, and both dims of the matrices can be sharded.

The ends of groups are values, so a shard of the rows or of the groups is computed by local operations that get the
offsets of their rows and groups; every device has all of ``ends``.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.placements import AxisStrategy, shard_dim
from autopar.passes.rule_language.claims import P, S, claim, claim_rule
from autopar.passes.rule_language.dimension_strings import strategies
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser

_OF_TRANSFORMERS = "transformers.grouped_mm_fallback"
_ALIGNMENT = 16  # bytes of which torch's kernel needs rows to be multiples
_ROWS, _INNER, _BACKWARD = "autopar.grouped_rows", "autopar.grouped_inner", "autopar.grouped_backward"


def _rows(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x [S, K], matrices [E, K, N], ends [E])`` -> [S, N]"""
    yield claim(call, {0: S(0)}, [S(0)], _ROWS)
    yield claim(call, {1: S(0)}, [P], _ROWS)
    yield claim(call, {0: S(1), 1: S(1)}, [P])
    yield claim(call, {1: S(2)}, [S(1)])
    yield claim(call, {0: P}, [P])
    yield claim(call, {1: P}, [P])


def _inner(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x [M, S], y [S, N], ends [E])`` -> [E, M, N]: one product over the rows of each group"""
    yield claim(call, {0: S(1), 1: S(0)}, [P], _INNER)
    yield claim(call, {}, [S(0)], _INNER)
    yield claim(call, {0: S(0)}, [S(1)])
    yield claim(call, {1: S(1)}, [S(2)])
    yield claim(call, {0: P}, [P])
    yield claim(call, {1: P}, [P])


@claim_rule("aten._grouped_mm.default")
def grouped_mm(call: OpCall) -> Iterator[AxisStrategy]:
    """``(a, b, ends?, bias?, dtype?)``; the ranks determine what is grouped."""
    ranks = [tensor.rank for tensor in call.inputs]
    if call.arg(3, "bias") is not None:
        return
    claims: Iterator[AxisStrategy] = iter(())
    if ranks == [2, 3, 1]:
        claims = _rows(call)
    elif ranks == [2, 2, 1]:
        claims = _inner(call)
    elif ranks == [3, 3]:
        claims = strategies(call, "bmk,bkn->bmn")
    yield from (strategy for strategy in claims if strategy.local or _is_aligned(call, strategy))


def _is_aligned(call: OpCall, strategy: AxisStrategy) -> bool:
    """Whether torch's kernel accepts the shards."""
    for tensor, placement in zip(call.inputs, strategy.inputs, strict=True):
        dim = shard_dim(placement)
        if dim is not None and int(tensor.shape[dim]) * tensor.dtype.itemsize % (_ALIGNMENT * call.size):
            return False
    return True


@claim_rule(f"{_OF_TRANSFORMERS}.default")
def grouped_of_transformers(call: OpCall) -> Iterator[AxisStrategy]:
    """The same operation, for dtypes that torch's own does not support everywhere."""
    yield from _rows(call)


@claim_rule(f"{_OF_TRANSFORMERS}_backward.default")
def grouped_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x [S, K], matrices [E, K, N], ends [E], grad [S, N])`` -> gradients of x and the matrices"""
    yield claim(call, {0: S(0), 3: S(0)}, [S(0), P], _BACKWARD)
    yield claim(call, {1: S(0)}, [P, S(0)], _BACKWARD)
    yield claim(call, {0: S(1), 1: S(1)}, [S(1), S(1)])
    yield claim(call, {1: S(2), 3: S(1)}, [P, S(2)])
    yield claim(call, {3: P}, [P, P])


@localiser(_ROWS, _BACKWARD)
def local_rows(context: LocalContext) -> LocalCall:
    call = context.call
    places = (context.input_offset(0, 0), context.input_offset(1, 0))
    if call.op.startswith(f"{_OF_TRANSFORMERS}_backward"):
        return _BACKWARD, (*call.args, *places), ()
    return _ROWS, (*call.args[:2], call.arg(2, "offs"), *places), ()


@localiser(_INNER)
def local_inner(context: LocalContext) -> LocalCall:
    call = context.call
    places = (context.input_offset(1, 0), context.output_offset(0, 0), context.output_shape()[0])
    return _INNER, (*call.args[:2], call.arg(2, "offs"), *places), ()
