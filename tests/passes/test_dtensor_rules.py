"""What DTensor says of operations without a rule, and what execution makes of it."""

from __future__ import annotations

import pytest
import torch

from autopar.passes.probe.dtensor_rules import dtensor_strategies, is_registered
from autopar.passes.probe.found_rules import KNOWN, found_strategies, source
from autopar.passes.probe.operator_study import learn
from autopar.passes.probe.probe import check
from autopar.passes.probe.rule_cache import parse_strategy
from autopar.passes.probe.trials import find_operation
from autopar.passes.rule_language.registry import OpCall
from tests.helpers.probing import call_of, texts


def x(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


CUMSUM = call_of("aten.cumsum.default", x(8, 6), 1)


def test_no_process_group_is_needed_or_made() -> None:
    dtensor_strategies(call_of("aten.sort.default", x(8, 5), size=8))
    assert not torch.distributed.is_initialized()


REGISTRIES = [
    (call_of("aten.mm.default", x(8, 6), x(6, 4)), "S(1) S(0) -> P(sum)"),
    (call_of("aten.amax.default", x(8, 6), (1,)), "S(1) -> P(max)"),
    (call_of("aten.stack.default", (x(8, 6), x(8, 6))), "S(1) S(1) -> S(2)"),
    (call_of("aten.topk.default", x(8, 16), 3), "S(0) -> S(0) S(0)"),
    (call_of("aten.cumsum.default", x(7, 6), 1, size=4), "S(0) -> S(0)"),
]


def op_of(value: object) -> str | None:
    return value.op if isinstance(value, OpCall) else None


@pytest.mark.parametrize(("asked", "expected"), REGISTRIES, ids=op_of)
def test_each_kind_of_registry_is_read(asked: OpCall, expected: str) -> None:
    assert expected in texts(dtensor_strategies(asked))


# One is tried in the quick suite: trying takes as many runs of an operation wherever its rule is from.
@pytest.mark.parametrize(
    ("asked", "expected"),
    [REGISTRIES[0], *(pytest.param(*r, marks=pytest.mark.slow) for r in REGISTRIES[1:])],
    ids=op_of,
)
def test_what_a_registry_says_is_found(asked: OpCall, expected: str) -> None:
    assert expected in texts(found_strategies(asked))
    assert source(asked).startswith("DTensor (")


LIES = [
    (CUMSUM, "S(1) -> S(1)"),
    (CUMSUM, "S(0) -> P(sum)"),
    (CUMSUM, "R -> S(0)"),
    (call_of("aten.relu.default", x(8, 6)), "P(sum) -> P(sum)"),
    (call_of("aten.mul.Tensor", x(8, 6), x(8, 6)), "P(sum) P(sum) -> P(sum)"),
    (call_of("aten.add.Tensor", x(8, 6), x(8, 6)), "P(sum) R -> P(sum)"),
    (call_of("aten._softmax.default", x(8, 6), 1, False), "S(1) -> S(1)"),
    (call_of("aten.argmax.default", x(8, 6), 1), "S(1) -> P(max)"),
    (call_of("aten.tril.default", x(8, 6)), "S(0) -> S(0)"),
]


@pytest.mark.parametrize(("asked", "lie"), LIES, ids=str)
def test_a_lie_is_found_out(asked: OpCall, lie: str) -> None:
    operation = find_operation(asked.op)
    assert operation is not None
    assert check(learn(asked, operation, cautious=False), [parse_strategy(lie)])[0] == []


@pytest.mark.parametrize("op", ["empty_like.default", "bernoulli.p", "native_dropout.default", "relu_.default"])
def test_what_cannot_be_judged_is_not_tried(op: str) -> None:
    arguments = {"bernoulli.p": (0.5,), "native_dropout.default": (0.5, True)}.get(op, ())
    asked = call_of(f"aten.{op}", x(8, 6), *arguments)
    before = len(KNOWN.findings)
    assert found_strategies(asked) == ()
    assert source(asked).startswith("fallback: it")
    assert len(KNOWN.findings) == before


def test_what_torch_does_not_know_falls_back() -> None:
    asked = OpCall("aten.no_such_operation.default", CUMSUM.inputs, CUMSUM.outputs, CUMSUM.args, (), 2)
    assert source(asked) == "fallback: it is no operation of torch"


def test_shards_are_never_empty() -> None:
    asked = call_of("aten.cumsum.default", x(5, 6), 1, size=4)
    assert "S(0) -> S(0)" not in texts(found_strategies(asked)), "5 rows on 4 devices are 2, 2, 1 and none"
    assert "S(0) -> S(0)" in texts(found_strategies(call_of("aten.cumsum.default", x(5, 6), 1, size=3)))


def test_what_torch_registered_itself_is_not_a_users() -> None:
    assert not is_registered("aten.mm.default")
    assert not is_registered("aten.cumsum.default")
