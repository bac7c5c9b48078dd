"""Rules of operations nobody knows: found by trying them, and never believed beyond what trying shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import tests.helpers.custom_ops  # noqa: F401
from autopar.errors import OperatorError
from autopar.ir.node import TensorType
from autopar.passes.probe import found_rules, sandbox
from autopar.passes.probe.found_rules import KNOWN, found_strategies, refuted, source
from autopar.passes.probe.sandbox import run_apart
from autopar.passes.rule_language.registry import OpCall
from tests.helpers.marks import slow_but, slow_rows_but
from tests.helpers.probing import call_of, texts


def x(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def i(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64)


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    KNOWN.clear()
    yield
    KNOWN.clear()


def custom(name: str, *args: Any, size: int = 2) -> OpCall:
    return call_of(f"probing.{name}.default", *args, size=size)


EXPECTED: dict[str, tuple[OpCall, str]] = {
    "pointwise": (custom("swish", x(8, 6)), "S(0) -> S(0); S(1) -> S(1)"),
    "uneven": (custom("swish", x(7, 9), size=3), "S(0) -> S(0); S(1) -> S(1)"),
    "no dim divides": (custom("swish", x(3, 1), size=4), ""),
    "a dim in the arguments": (custom("row_softmax", x(8, 6, 4), -1, 0.5), "S(0) -> S(0); S(1) -> S(1)"),
    "another dim": (custom("row_softmax", x(8, 6, 4), 1, 0.5), "S(0) -> S(0); S(2) -> S(2)"),
    "a size in the arguments": (custom("of_width", x(64, 64), 64), "S(0) -> S(0); P(sum) -> P(sum)"),
    "bias": (
        custom("linear_gelu", x(8, 6, 16), x(32, 16), x(32)),
        "S(0) R R -> S(0); S(1) R R -> S(1); R S(0) S(0) -> S(2)",
    ),
    "no bias": (custom("linear_gelu", x(8, 16), x(32, 16), None), "S(0) R -> S(0); R S(0) -> S(1)"),
    "gradients": (
        custom("linear_gelu_backward", x(8, 32), x(8, 16), x(32, 16), x(32)),
        "S(0) S(0) R R -> S(0) P(sum) P(sum); S(1) R S(0) S(0) -> P(sum) S(0) S(0)",
    ),
    "gradients, all sizes alike": (
        custom("linear_gelu_backward", x(8, 8), x(8, 8), x(8, 8), x(8)),
        "S(0) S(0) R R -> S(0) P(sum) P(sum); S(1) R S(0) S(0) -> P(sum) S(0) S(0)",
    ),
    "all sizes alike": (
        custom("plain_linear", x(8, 8), x(8, 8)),
        "S(0) R -> S(0); S(1) S(1) -> P(sum); R S(0) -> S(1); P(sum) R -> P(sum); R P(sum) -> P(sum)",
    ),
    "two results": (custom("normed", x(8, 6, 4)), "S(0) -> S(0) S(0); S(1) -> S(1) S(1)"),
    "half precision": (custom("swish", x(8, 6).half()), "S(0) -> S(0); S(1) -> S(1)"),
}

# A trial of an operation takes a second or more.
QUICK = ("another dim", "no bias", "gradients")


@pytest.mark.parametrize("name", slow_but(QUICK, EXPECTED))
def test_all_that_is_true_is_found(name: str) -> None:
    asked, expected = EXPECTED[name]
    assert texts(found_strategies(asked)) == set(filter(None, expected.split("; ")))
    assert expected == "" or source(asked).startswith("probed (")


@pytest.mark.parametrize(
    ("asked", "among"),
    slow_rows_but(
        [1],
        [
            (
                custom("take_rows", x(16, 4), i(8, 4), torch.ones(8, 4).bool()),
                {"S(1) R R -> S(2)", "R S(0) S(0) -> S(0)", "R S(1) S(1) -> S(1)", "P(sum) R R -> P(sum)"},
            ),
            (custom("segment_sum", x(16, 4), i(16), 8), {"S(0) S(0) -> P(sum)", "S(1) R -> S(1)"}),
            (
                custom("scale_all", (x(8, 4), x(8, 4), x(16)), (1.0, 2.0, 3.0)),
                {
                    "S(0) S(0) R -> S(0) S(0) R",
                    "S(1) S(1) R -> S(1) S(1) R",
                    "P(sum) P(sum) P(sum) -> P(sum) P(sum) P(sum)",
                },
            ),
            (custom("plain_linear", x(8, 16), x(32, 16), x(32)), {"S(1) S(1) P(sum) -> P(sum)"}),
            (call_of("aten._cdist_forward.default", x(8, 16, 5), x(8, 7, 5), 2.0, None), {"S(1) R -> S(1)"}),
            (call_of("aten.reflection_pad2d.default", x(8, 16, 5, 7), (1, 1, 1, 1)), {"S(0) -> S(0)", "S(1) -> S(1)"}),
            # These kernels compare no sizes: what is resized alone is read beyond its end.
            (
                call_of("aten.reflection_pad2d_backward.default", x(8, 16, 7, 9), x(8, 16, 5, 7), (1, 1, 1, 1)),
                {"S(0) S(0) -> S(0)", "S(1) S(1) -> S(1)"},
            ),
            (
                call_of("aten._cdist_backward.default", x(6, 16, 7), x(6, 16, 5), x(6, 7, 5), 2.0, x(6, 16, 7)),
                {"S(0) S(0) S(0) S(0) -> S(0)", "S(1) S(1) R S(1) -> S(1)", "S(2) R S(1) S(2) -> P(sum)"},
            ),
        ],
    ),
    ids=lambda value: value.op if isinstance(value, OpCall) else None,
)
def test_found_among_others(asked: OpCall, among: set[str]) -> None:
    found = texts(found_strategies(asked))
    assert among <= found
    assert not any(text.startswith("S(0) R") for text in found if "take_rows" in asked.op), "the table is indexed"


@pytest.mark.parametrize(
    ("asked", "lies"),
    slow_rows_but(
        [0, 1, 2],
        [
            (custom("gated", x(8, 4)), {"S(0) -> S(0)", "S(1) -> S(1)"}),
            (custom("tame", x(8, 4)), {"S(0) -> P(sum)", "P(sum) -> P(sum)"}),
            (custom("nearly_linear", x(8, 4)), {"S(0) -> P(sum)", "P(sum) -> P(sum)"}),
            (custom("small_identity", x(256, 4)), {"S(0) -> S(0)"}),
            (custom("of_width", x(8, 64), 64), {"S(1) -> S(1)"}),
            (call_of("aten.slice.Tensor", x(8, 256), 1, 0, 128), {"S(1) -> S(1)"}),
        ],
    ),
    ids=lambda value: value.op if isinstance(value, OpCall) else None,
)
def test_what_only_seems_true_is_not_believed(asked: OpCall, lies: set[str]) -> None:
    assert not lies & texts(found_strategies(asked))


def test_an_operation_that_draws_is_not_tried() -> None:
    asked = custom("tagged_noise", x(8, 4))
    assert found_strategies(asked) == ()
    assert source(asked) == "fallback: it draws random numbers"
    assert not KNOWN.findings


@pytest.mark.parametrize(("name", "said"), [("noisy", "draws random numbers"), ("sly", "writes into its operands")])
def test_what_would_differ_between_devices_is_refused(name: str, said: str) -> None:
    with pytest.raises(
        OperatorError, match=rf"probing.{name}.default cannot run on several devices: it {said}.*tag|decl"
    ):
        found_strategies(custom(name, x(8, 4)))


def test_a_declared_write_is_not_tried() -> None:
    kind = TensorType((8, 4), torch.float32)
    asked = OpCall("probing.increment.default", (kind,), (kind,), (found_rules.Operand(0),), (), 2)
    assert source(asked) == "fallback: it writes into its operands"


@pytest.mark.parametrize(("name", "said"), [("crashing", "SIGABRT"), ("for_gpus", "no kernel for the CPU")])
def test_what_cannot_be_tried_says_why(name: str, said: str) -> None:
    asked = custom(name, x(8, 4))
    assert found_strategies(asked) == ()
    assert said in source(asked)


def test_a_trial_has_an_end() -> None:
    def for_ever() -> None:
        while True:
            pass

    assert run_apart(for_ever, cpu_seconds=1).failure == "not done after 1 s of computing"
    assert run_apart(lambda: sandbox.time.sleep(60), wall=0.3).late
    assert run_apart(lambda: [1, 2]).value == [1, 2]
    assert "ValueError: invalid" in run_apart(lambda: int("no")).failure


def test_nothing_of_a_trial_is_left_here() -> None:
    """Neither numbers drawn nor what an operation does to its own library."""
    before = torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert found_strategies(custom("swish", x(8, 6, 8)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def registering() -> Iterator[Any]:
    """``register_sharding``, undone afterwards."""
    functions = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    before = dict(functions)
    yield register_sharding
    functions.clear()
    functions.update(before)


def by_rows(x: Any) -> Any:
    return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]


def test_a_registered_rule_is_honoured_and_proven(registering: Any) -> None:
    asked = custom("swish", x(8, 6))
    registering(torch.ops.probing.swish.default)(by_rows)
    assert texts(found_strategies(asked)) == {"S(0) -> S(0)"}, "S(1), which probing would find, was not registered"
    assert source(asked).startswith("registered (")
    assert refuted(asked) == ()


def test_a_registered_lie_is_left_out_and_named(registering: Any) -> None:
    asked = custom("gated", x(8, 6))
    registering(torch.ops.probing.gated.default)(by_rows)
    assert found_strategies(asked) == ()
    assert refuted(asked) == ("S(0) -> S(0)",)


def test_a_registered_rule_that_cannot_be_tried_is_trusted(registering: Any) -> None:
    asked = custom("for_gpus", x(8, 6))
    registering(torch.ops.probing.for_gpus.default)(by_rows)
    assert texts(found_strategies(asked)) == {"S(0) -> S(0)"}
    assert source(asked).startswith("registered, not proven: ")
