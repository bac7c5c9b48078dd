"""Operations nobody knows in whole models, and beside what is known of others."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.placements import Shard, StridedShard
from autopar.passes.probe.found_rules import KNOWN
from autopar.passes.probe.operator_study import Unfit, learn
from autopar.passes.probe.probe import fits, probe
from autopar.passes.probe.trials import find_operation
from autopar.passes.rules import RULES
from tests.helpers.custom_ops import Fused
from tests.helpers.planning import slow_devices
from tests.oracle.harness import Case, Sample, check


@pytest.mark.parametrize("mesh", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_model_of_unknown_operations_is_divided_and_right(mesh: tuple[int, ...]) -> None:
    report = autopar.verify(Fused(32, 128), mesh, torch.randn(256, 32), cluster=slow_devices(), timeout=250)
    assert report.ok, str(report)
    assert report.unpriced == ()
    plan = report.plan
    unknown = [name for name, node in plan.nodes.items() if node.op.startswith("probing.")]
    assert len(unknown) == 4, "two layers, forward and backward"
    for name in unknown:
        strategy = plan.strategies[name]
        for axis in range(len(mesh)):
            assert any(isinstance(p[axis], Shard) for p in (*strategy.inputs, *strategy.outputs)), f"{name}: {strategy}"
        assert "probed (" in str(plan.why(name))
    assert plan.fallbacks == ()
    assert plan.warnings == ()
    assert any(str(row[0]).startswith("probed") for row in plan.table(by="rule").rows)
    assert autopar.Plan.from_json(plan.to_json()).rules == plan.rules


class Gated(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(8, 8), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(torch.ops.probing, self.op)(x)
        return self.linear(found).square().mean()


def test_what_has_no_rule_is_replicated_and_named_with_its_price() -> None:
    plan = autopar.plan(Gated("gated"), (2, 2), torch.randn(8, 8), cluster="dgx-a100-80gb")
    assert plan.fallbacks == ("probing.gated.default",)
    (warning,) = plan.warnings
    assert "no way to divide it held in" in warning and "ms a step" in warning
    name = next(n for n, node in plan.nodes.items() if node.op == "probing.gated.default")
    assert "fallback: no way to divide it" in str(plan.why(name))


def test_what_draws_in_secret_is_an_error_that_says_where() -> None:
    with pytest.raises(autopar.OperatorError, match=r"probing.noisy.default cannot run.*random.*in the model"):
        autopar.plan(Gated("noisy"), (2,), torch.randn(8, 8), cluster="dgx-a100-80gb")


def test_a_declared_write_is_an_error_that_names_the_operation() -> None:
    with pytest.raises(autopar.TraceError, match=r"probing.increment.default writes into its arguments"):
        autopar.plan(Gated("increment"), (2,), torch.randn(8, 8), cluster="dgx-a100-80gb")


# One operation or two of every family of written rules.
FAMILIES = {
    "samples_pointwise": ("add.Tensor", "mul.Tensor", "gelu.default", "where.self", "relu.default", "exp.default"),
    "samples_matmul": ("mm.default", "bmm.default", "addmm.default", "mv.default", "baddbmm.default"),
    "samples_reduce": (
        "sum.dim_IntList",
        "amax.default",
        "mean.dim",
        "cumsum.default",
        "var.correction",
        "topk.default",
    ),
    "samples_softmax": (
        "_softmax.default",
        "_log_softmax.default",
        "logsumexp.default",
        "_softmax_backward_data.default",
    ),
    "samples_norm": ("native_layer_norm.default", "native_layer_norm_backward.default", "native_group_norm.default"),
    "samples_lookup": ("embedding.default", "gather.default", "scatter_add.default"),
    "samples_indexing": ("index_select.default", "index.Tensor", "index_add.default"),
    "samples_conv": ("convolution.default",),
    "samples_pool": ("avg_pool2d.default", "upsample_nearest2d.vec"),
    "samples_view": ("permute.default", "transpose.int", "unsqueeze.default", "squeeze.dim"),
    "samples_data": ("cat.default", "constant_pad_nd.default", "flip.default", "tril.default"),
}


def samples(every_pair: bool) -> list[tuple[Sample, int]]:
    """The first two samples of each operation on two and on three devices; unless ``every_pair``, the first of one on
    two, of the next on three, and so on."""
    found: list[tuple[Sample, int]] = []
    turns = itertools.cycle((0, 1))
    for module, names in FAMILIES.items():
        known = importlib.import_module(f"tests.oracle.{module}").SAMPLES
        for name in names:
            these = [sample for sample in known if sample.op == f"aten.{name}"][:2]
            pairs = [(sample, devices) for devices in (2, 3) for sample in these]
            found += pairs if every_pair else [(sample, 2 + next(turns)) for sample in these[:1]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every_pair", [False, True])
def test_probing_finds_what_is_written_and_nothing_false(every_pair: bool) -> None:
    """The oracle, which knows nothing of probing, judges what it finds where somebody has written a rule."""
    written, missed, ops = 0, Counter[str](), set()
    for sample, devices in samples(every_pair):
        case = Case.of(sample, devices)
        operation = find_operation(sample.op)
        assert operation is not None
        try:
            proven, _ = probe(learn(case.call, operation, cautious=False))
        except Unfit:
            proven = []
        found = [p.strategy for p in proven if fits(case.call, p)]
        ops.add(sample.op)
        for strategy in found:
            wrong = check(case, strategy)
            assert not wrong or "leaves a device empty" in wrong, f"{sample}: {strategy}: {wrong}"
        plain = {
            s
            for s in RULES[sample.op](case.call)
            if not s.local and not any(isinstance(p, StridedShard) for p in (*s.inputs, *s.outputs))
        }
        written += len(plain)
        missed.update(f"{sample.op} {s}" for s in plain - set(found))
    share = 1 - missed.total() / written
    print(f"\nprobing {len(ops)} operations finds {share:.1%} of {written} written strategies; misses {dict(missed)}")
    assert len(ops) > 35
    assert share > 0.8


def test_nothing_is_probed_where_rules_are_written() -> None:
    KNOWN.clear()
    autopar.plan(nn.Sequential(nn.Linear(8, 8)), (2,), torch.randn(8, 8), cluster="dgx-a100-80gb", loss_fn=torch.sum)
    assert not KNOWN.findings
