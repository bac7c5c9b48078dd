"""What dimension strings and the rules built on them offer, to the letter; and that the oracle can fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autopar.errors import AutoparError
from autopar.ir.node import TensorType
from autopar.ir.placements import PARTIAL_SUM, REPLICATE, AxisStrategy, Shard, StridedShard
from autopar.passes import rules as rule_table
from autopar.passes.rule_language.dimension_strings import (
    AGNOSTIC,
    VARIANTS,
    letters,
    shardable,
    strategies,
    strided_variants,
    without,
)
from autopar.passes.rule_language.registry import LOCALISERS, RULES, OpCall, Operand
from tests.oracle.harness import Case, Sample, check, join, split

PASSES = Path(rule_table.__file__).parent


def call(inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], size: int = 2, op: str = "test") -> OpCall:
    def types(shapes: list[tuple[int, ...]]) -> tuple[TensorType, ...]:
        return tuple(TensorType(shape, torch.float32) for shape in shapes)

    return OpCall(op, types(inputs), types(outputs), tuple(map(Operand, range(len(inputs)))), (), size)


def offered(formula: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], size: int = 2) -> list[str]:
    return list(map(str, strategies(call(inputs, outputs, size), formula)))


def rule_offers(sample: Sample, size: int = 2) -> list[str]:
    """What the rule of the sample yields, strided variants not included."""
    case = Case.of(sample, size)
    return list(map(str, RULES[sample.op](case.call)))


def test_product() -> None:
    found = offered("mk,kn->mn", [(4, 6), (6, 8)], [(4, 8)])
    assert found == [
        "S(0) R -> S(0)",
        "S(1) S(0) -> P(sum)",
        "R S(1) -> S(1)",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    ]


def test_sum_of_products_broadcasts_its_addend() -> None:
    found = offered("mn+mk,kn->mn", [(8,), (4, 6), (6, 8)], [(4, 8)])
    assert set(found) == {
        "R S(0) R -> S(0)",
        "S(0) R S(1) -> S(1)",
        "P(sum) S(1) S(0) -> P(sum)",
        "P(sum) P(sum) R -> P(sum)",
        "P(sum) R P(sum) -> P(sum)",
    }


def test_length_one_is_replicated_and_small_dims_are_not_offered() -> None:
    assert offered("ab,ab->ab", [(1, 8), (5, 8)], [(5, 8)], 4)[0] == "S(1) S(1) -> S(1)"
    assert "R S(0) -> S(0)" in offered("ab,ab->ab", [(1, 8), (8, 8)], [(8, 8)], 4)


def test_ellipsis_stands_for_leading_dims() -> None:
    found = offered("...k,nk->...n", [(4, 6, 8), (2, 8)], [(4, 6, 2)])
    assert set(found) == {
        "S(0) R -> S(0)",
        "S(1) R -> S(1)",
        "S(2) S(1) -> P(sum)",
        "R S(0) -> S(2)",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    }


@pytest.mark.parametrize("formula", ["a,b->ab", "a->a", "a,a,a->a", "a,a->a,a"])
def test_a_formula_that_does_not_fit_is_an_error(formula: str) -> None:
    with pytest.raises(AutoparError, match="formula"):
        offered(formula, [(4, 6), (4, 6)], [(4, 6)])


def test_no_partial_booleans() -> None:
    mask = OpCall("test", (TensorType((4,), torch.bool),), (TensorType((4,), torch.bool),), (Operand(0),), (), 2)
    assert list(map(str, strategies(mask, "a->a"))) == ["S(0) -> S(0)"]
    assert list(strategies(mask, "a->_")) == []


def test_spelling() -> None:
    assert letters(4, [-3, 3]) == "a_c_"
    assert letters(0) == ""
    assert without("abc", [-1, 0]) == "b"


@pytest.mark.parametrize(
    ("size", "devices", "fits"), [(5, 4, False), (7, 4, True), (4, 4, True), (3, 4, False), (257, 4, True)]
)
def test_shardable_means_nobody_is_left_empty(size: int, devices: int, fits: bool) -> None:
    assert shardable(size, devices) == fits
    assert fits == (len(torch.arange(size).chunk(devices)) == devices)


RESHAPES = [
    ((2, 6, 5), (12, 5), ["S(0) -> S(0)", "S(1) -> S(0/2)", "S(2) -> S(1)"]),
    ((4, 36), (4, 3, 12), ["S(0) -> S(0)", "S(1/3) -> S(2)"]),
    ((4, 36), (4, 3, 4, 3), ["S(0) -> S(0)", "S(1/3) -> S(2)"]),
    ((5, 8), (8, 5), []),
    ((7, 3), (7, 1, 3), ["S(0) -> S(0)", "S(1) -> S(2)"]),
    ((7, 3), (21,), []),
    ((12,), (2, 6), ["S(0) -> S(0)", "S(0/2) -> S(1)"]),
    ((4, 6), (6, 4), ["S(0) -> S(0)", "S(1/3) -> S(1/2)"]),
]


@pytest.mark.parametrize(("source", "target", "expected"), RESHAPES)
def test_reshape(source: tuple[int, ...], target: tuple[int, ...], expected: list[str]) -> None:
    found = rule_offers(Sample("aten.reshape.default", (torch.rand(source), target)))
    assert [text for text in found if "P(" not in text] == expected


def test_reshape_is_complete() -> None:
    """Every one-axis claim of sharded dims that is true by execution is offered, with strided variants."""
    for source, target in [
        ((4, 6), (6, 4)),
        ((2, 6, 4), (12, 4)),
        ((2, 12), (2, 3, 4)),
        ((24,), (2, 3, 4)),
        ((4, 4), (2, 8)),
    ]:
        case = Case.of(
            Sample(
                "aten.reshape.default",
                (torch.arange(24 * 2.0)[: torch.Size(source).numel()].reshape(source), target),
            ),
            2,
        )
        true = {s for s in _all_shards(source, target) if not check(case, s)}
        befores = {size: frozenset(range(2, size + 1)) for size in (*source, *target)}
        found = set(RULES[case.call.op](case.call))
        found |= {v for s in found for v in strided_variants(case.call, s, befores)}
        assert true == {s for s in found if s.inputs != (PARTIAL_SUM,)}


def _all_shards(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[AxisStrategy]:
    """Every pair of shards of an input and an output dim, strided ones included."""

    def places(shape: tuple[int, ...]) -> list[Shard | StridedShard]:
        return [
            StridedShard(dim, before) if before > 1 else Shard(dim)
            for dim, size in enumerate(shape)
            for before in range(1, size + 1)
            if size % (before * 2) == 0
        ]

    for one in places(source):
        for other in places(target):
            yield AxisStrategy((one,), (other,))


def test_fused_projection_is_split_by_heads() -> None:
    assert "S(1/3) -> S(1) S(1) S(1)" in rule_offers(Sample("aten.split.Tensor", (torch.rand(5, 36), 12, 1)))
    assert "S(1) S(1) -> S(1/2)" in rule_offers(Sample("aten.cat.default", ([torch.rand(5, 4), torch.rand(5, 4)], 1)))
    unequal = rule_offers(Sample("aten.split_with_sizes.default", (torch.rand(4, 36), [24, 6, 6], 1)))
    assert unequal == ["S(0) -> S(0) S(0) S(0)", "P(sum) -> P(sum) P(sum) P(sum)"]


def test_partial_passes_where_linear_only() -> None:
    x = torch.rand(4)
    assert rule_offers(Sample("aten.add.Tensor", (x, 1.0))) == ["S(0) -> S(0)"]
    assert rule_offers(Sample("aten.add.Tensor", (x, x))) == ["S(0) S(0) -> S(0)", "P(sum) P(sum) -> P(sum)"]
    assert rule_offers(Sample("aten.relu.default", (x,))) == ["S(0) -> S(0)"]
    assert "P(sum) -> P(sum)" not in rule_offers(Sample("aten.masked_fill.Scalar", (x, x > 0.5, 1.0)))
    assert "R P(sum) P(sum) -> P(sum)" in rule_offers(Sample("aten.where.self", (x > 0.5, x, x)))
    assert rule_offers(Sample("aten.amax.default", (torch.rand(4, 6), [1]))) == [
        "S(0) -> S(0)",
        "S(1) -> P(max)",
    ]


def test_random_and_mutating_operations_have_no_pointwise_rule() -> None:
    named = (
        "native_dropout.default",
        "bernoulli.default",
        "bernoulli.p",
        "rand_like.default",
        "add_.Tensor",
        "add.out",
        "relu_.default",
    )
    assert {f"aten.{name}" for name in named} & set(RULES) == set()
    assert [op for op in RULES if op.split(".")[1].endswith("_") and not op.split(".")[1].startswith("__")] == []


def test_strided_variants_follow_the_factors() -> None:
    multiply = call([(12, 5), (12, 5)], [(12, 5)], op="aten.mul.Tensor")
    (plain,) = (s for s in RULES[multiply.op](multiply) if s.outputs == (Shard(0),))
    found = strided_variants(multiply, plain, {12: frozenset({1, 3, 5, 12}), 5: frozenset({5})})
    assert list(map(str, found)) == ["S(0/3) S(0/3) -> S(0/3)"]


def test_strided_variants_only_where_any_order_will_do() -> None:
    factors = {12: frozenset({3}), 6: frozenset({3})}
    shards = AxisStrategy((Shard(0),), (Shard(0),))
    assert list(strided_variants(call([(12,)], [(12,)], op="unknown"), shards, factors)) == []
    # A local operation counts positions; dims of two lengths have no common stride.
    local = AxisStrategy((Shard(0),), (Shard(0),), "autopar.masked_gather")
    assert list(strided_variants(call([(12,)], [(12,)], op="aten.neg.default"), local, factors)) == []
    assert list(strided_variants(call([(12,)], [(6,)], op="aten.neg.default"), shards, factors)) == []


def test_an_untrue_strategy_is_caught() -> None:
    """The oracle can fail: a claim of each kind that is wrong is found out."""
    x = torch.randn(4, 6, dtype=torch.float64)
    untrue = [
        (Sample("aten.relu.default", (x,)), AxisStrategy((PARTIAL_SUM,), (PARTIAL_SUM,)), "differs"),
        (Sample("aten.relu.default", (x,)), AxisStrategy((Shard(0),), (Shard(1),)), "claimed"),
        (Sample("aten.relu.default", (x,)), AxisStrategy((Shard(0),), (REPLICATE,)), "claimed"),
        (Sample("aten.relu.default", (x[:1],)), AxisStrategy((Shard(0),), (Shard(0),)), "empty"),
        (
            Sample("aten.relu.default", (x,)),
            AxisStrategy((StridedShard(1, 2),), (StridedShard(1, 2),)),
            "no placement",
        ),
        (
            Sample("aten.sum.dim_IntList", (x, [0])),
            AxisStrategy((Shard(0),), (REPLICATE,)),
            "replicas differ",
        ),
        (Sample("aten.cumsum.default", (x, 1)), AxisStrategy((Shard(1),), (Shard(1),)), "differs"),
        (Sample("aten.flip.default", (x, [0])), AxisStrategy((Shard(0),), (Shard(0),)), "differs"),
        (Sample("aten.add.Tensor", (x, x)), AxisStrategy((Shard(0), REPLICATE), (Shard(0),)), "RuntimeError"),
    ]
    for sample, strategy, reason in untrue:
        assert reason in check(Case.of(sample, 2), strategy)


@pytest.mark.parametrize("text", ["R", "S(1)", "S(0/2)", "P(sum)", "P(max)", "P(min)"])
def test_splitting_and_joining_are_inverse(text: str) -> None:
    from autopar.ir.placements import parse_placement

    x = torch.randn(12, 7, dtype=torch.float64)
    torch.testing.assert_close(join(split(x, parse_placement(text), 3), parse_placement(text)), x)


def test_every_rule_file_is_registered() -> None:
    files = {path.stem for path in PASSES.glob("[!_]*.py")}
    assert set(rule_table.RULE_MODULES) == files
    homes = {function.__module__.rpartition(".")[2] for function in RULES.values()}
    # A file of formulas leaves its functions in dimension_strings.
    without_functions = {f for f in files if "dimension_rule(" in (PASSES / f"{f}.py").read_text()}
    assert files - homes <= without_functions


def test_registers_name_operations_that_exist() -> None:
    for op in {name for name in (*RULES, *AGNOSTIC, *VARIANTS, *LOCALISERS) if name.startswith("aten.")}:
        _, base, overload = op.split(".")
        assert hasattr(getattr(torch.ops.aten, base), overload), op
    assert AGNOSTIC - set(RULES) == set()
    assert {name for name in LOCALISERS if name.startswith("aten.")} - set(RULES) == set()
