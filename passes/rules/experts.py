"""Mixture-of-experts blocks (:mod:`autopar.ops.experts`): tokens can be sharded, and so can experts.

Sharding experts is *expert parallelism*: each device has some of the experts, reads all tokens, and computes its
experts' contribution to them, a Partial(sum). So tokens that are sharded outside of the block are gathered before it
and reduce-scattered after it.

Sharding both over the same axis, tokens stay where they are: inside of the operation all-to-alls send every choice to
the device of its expert and its result back (:mod:`autopar.ops.exchanged_experts`). Only where experts divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from autopar.ir.placements import AxisStrategy, Placement
from autopar.passes.rule_language.claims import P, R, S, claim, claim_rule
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser

EXPERTS, BACKWARD = "autopar.experts.default", "autopar.experts_backward.default"
_SOME = {EXPERTS: "autopar.some_experts", BACKWARD: "autopar.some_experts_backward"}
EXCHANGED = {EXPERTS: "autopar.exchanged_experts", BACKWARD: "autopar.exchanged_experts_backward"}


def _biases(call: OpCall, tokens: int) -> list[bool]:
    """Whether each matrix has a bias; ``tokens``: the position of the tokens among the arguments."""
    return [call.args[tokens + 5] is not None, call.args[tokens + 6] is not None]


def _by_experts(call: OpCall, tokens: int) -> dict[int | None, Placement]:
    """The operands that have one entry per expert, sharded by it."""
    return dict.fromkeys(range(tokens + 3, tokens + 5 + sum(_biases(call, tokens))), S(0))


def _divide_evenly(call: OpCall, tokens: int) -> bool:
    """Whether every device of the axis has as many experts."""
    return int(call.inputs[tokens + 3].shape[0]) % call.size == 0


@claim_rule(EXPERTS)
def experts(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, ids, weights, up, down, up_bias?, down_bias?, ...)`` -> [T, H]"""
    yield claim(call, {0: S(0), 1: S(0), 2: S(0)}, [S(0)])
    yield claim(call, {2: P}, [P])
    yield claim(call, _by_experts(call, 0), [P], _SOME[EXPERTS])
    if _divide_evenly(call, 0):
        yield claim(call, {0: S(0), 1: S(0), 2: S(0), **_by_experts(call, 0)}, [S(0)], EXCHANGED[EXPERTS])


@claim_rule(BACKWARD)
def experts_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad, x, ids, weights, up, down, up_bias?, down_bias?, ...)`` -> gradients of x, weights and the parameters"""
    biases = [[S(0), P, P] if has_bias else [R, R, R] for has_bias in _biases(call, 1)]
    by_experts, by_tokens, linear = ([bias[kind] for bias in biases] for kind in range(3))
    yield claim(call, {0: S(0), 1: S(0), 2: S(0), 3: S(0)}, [S(0), S(0), P, P, *by_tokens])
    yield claim(call, {0: P}, [P, P, P, P, *linear])
    yield claim(call, _by_experts(call, 1), [P, P, S(0), S(0), *by_experts], _SOME[BACKWARD])
    if _divide_evenly(call, 1):
        tokens: dict[int | None, Placement] = dict.fromkeys(range(4), S(0))
        places = [S(0), S(0), S(0), S(0), *by_experts]
        yield claim(call, tokens | _by_experts(call, 1), places, EXCHANGED[BACKWARD])


@localiser(*_SOME.values())
def local_experts(context: LocalContext) -> LocalCall:
    """The operation itself, with the index of the first local expert."""
    call = context.call
    tokens = 1 if call.op == BACKWARD else 0
    first = context.input_offset(tokens + 3, 0)
    return call.op, (*call.args[:-1], first), call.kwargs


@localiser(*EXCHANGED.values())
def exchanged_experts(context: LocalContext) -> LocalCall:
    """The exchange over the axes that shard matrices, with the first expert of each device in it."""
    call = context.call
    matrix = 4 if call.op == BACKWARD else 3
    axes = tuple(axis for axis, place in enumerate(context.inputs[matrix]) if place == S(0))
    name = EXCHANGED[call.op].removeprefix("autopar.")
    starts = []
    for place in product(*(range(context.mesh[axis]) for axis in axes)):
        there = list(context.coordinate)
        for axis, index in zip(axes, place, strict=True):
            there[axis] = index
        starts.append(replace(context, coordinate=tuple(there)).input_offset(matrix, 0))
    kwargs = (("axes", axes), ("starts", tuple(starts)))
    return f"collective.{name}", call.args[:-1], (*call.kwargs, *kwargs)
