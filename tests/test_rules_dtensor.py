"""Strategies of operations without a rule: what DTensor proposes, and what execution makes of it."""

from __future__ import annotations

import pytest
import torch

from autopar.graph import Arg, TensorType
from autopar.passes.proof import prove
from autopar.passes.rule_table import RULES
from autopar.passes.rules import OpCall, Operand
from autopar.passes.rules_dtensor import dtensor_strategies, proven_strategies
from autopar.spec import AxisStrategy, parse_placement

Shapes = tuple[tuple[int, ...], ...]
X, Y = Operand(0), Operand(1)


def call(op: str, inputs: Shapes, outputs: Shapes, *args: Arg, size: int = 2) -> OpCall:
    kinds = [tuple(TensorType(shape, torch.float32) for shape in shapes) for shapes in (inputs, outputs)]
    return OpCall(op, kinds[0], kinds[1], args, (), size)


def strategy(text: str) -> AxisStrategy:
    left, right = text.split(" -> ")
    inputs, outputs = (tuple(map(parse_placement, side.split())) for side in (left, right))
    return AxisStrategy(inputs, outputs)


def texts(strategies: tuple[AxisStrategy, ...]) -> set[str]:
    return set(map(str, strategies))


CUMSUM = call("aten.cumsum.default", ((8, 6),), ((8, 6),), X, 1)
UNEVEN_CUMSUM = call("aten.cumsum.default", ((7, 6),), ((7, 6),), X, 1, size=4)


@pytest.mark.parametrize("asked", [CUMSUM, UNEVEN_CUMSUM])
def test_a_known_operation_is_proposed_and_proven(asked: OpCall) -> None:
    assert texts(dtensor_strategies(asked)) == {"S(0) -> S(0)"}
    assert texts(proven_strategies(asked)) == {"S(0) -> S(0)"}


def test_no_process_group_is_needed_or_made() -> None:
    dtensor_strategies(call("aten.sort.default", ((8, 5),), ((8, 5), (8, 5)), X, size=8))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (call("aten.mm.default", ((8, 6), (6, 4)), ((8, 4),), X, Y), "S(1) S(0) -> P(sum)"),
        (call("aten.amax.default", ((8, 6),), ((8,),), X, (1,)), "S(1) -> P(max)"),
        (call("aten.stack.default", ((8, 6), (8, 6)), ((2, 8, 6),), (X, Y)), "S(1) S(1) -> S(2)"),
        (call("aten.topk.default", ((8, 16),), ((8, 3), (8, 3)), X, 3), "S(0) -> S(0) S(0)"),
    ],
    ids=lambda value: value.op if isinstance(value, OpCall) else None,
)
def test_each_kind_of_registry_is_read(asked: OpCall, expected: str) -> None:
    assert expected in texts(dtensor_strategies(asked))
    assert expected in texts(proven_strategies(asked))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            call("aten.reflection_pad2d.default", ((8, 16, 5, 7),), ((8, 16, 7, 9),), X, (1, 1, 1, 1)),
            {"S(0) -> S(0)", "S(1) -> S(1)"},
        ),
        (
            call(
                "aten.reflection_pad2d_backward.default",
                ((8, 6, 7, 9), (8, 6, 5, 7)),
                ((8, 6, 5, 7),),
                X,
                Y,
                (1,) * 4,
            ),
            {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)"},
        ),
        (
            call("aten._cdist_forward.default", ((8, 16, 5), (8, 7, 5)), ((8, 16, 7),), X, Y, 2.0, None),
            {"S(0) S(0) -> S(0)", "S(1) R -> S(1)"},
        ),
        (call("aten.tril.default", ((8, 16, 16),), ((8, 16, 16),), X), {"S(0) -> S(0)"}),
    ],
    ids=lambda value: value.op if isinstance(value, OpCall) else None,
)
def test_an_operation_dtensor_does_not_know_is_guessed_at(asked: OpCall, expected: set[str]) -> None:
    assert dtensor_strategies(asked) == ()
    assert texts(proven_strategies(asked)) == expected


@pytest.mark.parametrize(
    ("asked", "lie"),
    [
        (CUMSUM, "S(1) -> S(1)"),
        (CUMSUM, "S(0) -> P(sum)"),
        (CUMSUM, "R -> S(0)"),
        (call("aten.relu.default", ((8, 6),), ((8, 6),), X), "P(sum) -> P(sum)"),
        (call("aten.mul.Tensor", ((8, 6), (8, 6)), ((8, 6),), X, Y), "P(sum) P(sum) -> P(sum)"),
        (call("aten.add.Tensor", ((8, 6), (8, 6)), ((8, 6),), X, Y), "P(sum) R -> P(sum)"),
        (call("aten._softmax.default", ((8, 6),), ((8, 6),), X, 1, False), "S(1) -> S(1)"),
        (call("aten.argmax.default", ((8, 6),), ((8,),), X, 1), "S(1) -> P(max)"),
        (call("aten.tril.default", ((8, 6),), ((8, 6),), X), "S(0) -> S(0)"),
    ],
    ids=str,
)
def test_a_lie_is_found_out(asked: OpCall, lie: str) -> None:
    assert prove(asked, [strategy(lie)]) == ()


@pytest.mark.parametrize(
    "asked",
    [
        call("aten.empty_like.default", ((8, 6),), ((8, 6),), X),
        call("aten.bernoulli.p", ((8, 6),), ((8, 6),), X, 0.5),
        call("aten.native_dropout.default", ((8, 6),), ((8, 6), (8, 6)), X, 0.5, True),
        call("aten.relu_.default", ((8, 6),), ((8, 6),), X),
        call("aten.no_such_operation.default", ((8, 6),), ((8, 6),), X),
    ],
    ids=lambda asked: asked.op,
)
def test_what_cannot_be_judged_is_not_proven(asked: OpCall) -> None:
    outputs = " ".join(["S(0)"] * len(asked.outputs))
    assert prove(asked, [strategy(f"S(0) -> {outputs}")]) == ()


def test_a_number_that_means_less_at_full_size_is_not_trusted() -> None:
    """The first 128 of 256 positions are all of the few a shrunk tensor has, where S(1) would seem true."""
    asked = call("aten.slice.Tensor", ((8, 256),), ((8, 128),), X, 1, 0, 128)
    assert prove(asked, [strategy("S(1) -> S(1)")]) == ()
    whole = call("aten.slice.Tensor", ((8, 256),), ((8, 256),), X, 1, 0, (1 << 63) - 1)
    assert texts(prove(whole, [strategy("S(1) -> S(1)")])) == {"S(1) -> S(1)"}


def test_shards_are_never_empty() -> None:
    asked = call("aten.cumsum.default", ((5, 6),), ((5, 6),), X, 1, size=4)
    assert proven_strategies(asked) == (), "5 rows on 4 devices are 2, 2, 1 and none"


def test_the_callers_device_precision_and_randomness_do_not_matter() -> None:
    """The sizes are found nowhere else: remembered answers would prove nothing."""
    asked = call("aten.cumsum.default", ((8, 6, 8),), ((8, 6, 8),), X, 1)
    before = torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        found = proven_strategies(asked)
    assert texts(found) == {"S(0) -> S(0)", "S(2) -> S(2)"}
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "asked",
    [
        call("aten.mm.default", ((8, 6), (6, 4)), ((8, 4),), X, Y),
        call("aten.bmm.default", ((8, 6, 7), (8, 7, 4)), ((8, 6, 4),), X, Y),
        call("aten._softmax.default", ((8, 6, 5),), ((8, 6, 5),), X, 1, False),
    ],
    ids=lambda asked: asked.op,
)
def test_our_rules_offer_whatever_can_be_proven(asked: OpCall) -> None:
    proven = proven_strategies(asked)
    assert proven
    assert set(proven) <= set(RULES[asked.op](asked))
