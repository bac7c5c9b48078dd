"""The plan for so many devices, beside others."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ArgumentError, AutoparError
from autopar.layout import Layout
from autopar.options import Options
from autopar.priced.plan_layouts import ONE_AXIS, mesh_for
from benchmarks.recipes import Recipe

from .models import A100, BATCH, batch, model, summed

OURS = Layout(data=4, microbatch=4, zero=1)


@cache
def layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))


@cache
def report() -> autopar.LayoutReport:
    """For four devices, with one stage, so that it takes little time."""
    return autopar.plan_layouts(
        model(), batch(), A100, devices=4, tokens=1e9, compare={"ours": OURS}, options=Options(stages=1)
    )


def test_the_plan_is_that_of_as_many_devices() -> None:
    found = report()
    plan = autopar.plan(model(), (4,), batch(), cluster=A100, options=Options(stages=1, precision="bf16"))
    assert (found.plan.lines, found.plan.predicted, found.plan.baselines) == (
        plan.lines,
        plan.predicted,
        plan.baselines,
    )
    assert found.found[0].predicted is found.plan.predicted and found.found[0].fits
    others = [row.described for row in found.found[1:]]
    assert set(others) == set(found.plan.baselines) and len(others) > 1
    steps = [row.predicted.step_seconds for row in found.found[1:]]
    assert steps == sorted(steps)


def test_what_is_compared_is_priced_as_by_price() -> None:
    found = report().named["ours"]
    alone = autopar.price(model(), batch(), A100, layout=OURS)
    assert (found.plan.lines, found.layout, found.flops_per_second) == (
        alone.plan.lines,
        alone.layout,
        alone.flops_per_second,
    )


def test_a_report_says_what_training_takes() -> None:
    found = report()
    elements = sum(parameter.numel() for parameter in model().parameters())
    assert found.checkpoint_bytes == 12 * elements
    assert found.days(found.plan) == pytest.approx(1e9 / (BATCH * 128) * found.plan.predicted.step_seconds / 86400)
    data, text = found.data(), str(found)
    assert data["layouts"][0]["step_seconds"] == found.plan.predicted.step_seconds
    assert data["layouts"][0]["days"] == found.days(found.plan) and data["ours"]["fits"]
    assert data["ours"]["tflops_per_device"] == pytest.approx(found.named["ours"].flops_per_second / 1e12)
    lines = text.splitlines()
    assert lines[0].startswith("Decoder: ") and f"on 4 devices of {A100.name}, batches of {BATCH}" in lines[0]
    (ours,) = (line for line in lines if line.startswith("ours"))
    assert ours.endswith("  data=4 microbatch=4 zero=1") and "checkpoint: " in text and "prices: NVIDIA A100" in text


@pytest.mark.slow
def test_options_restrict_the_plan_and_not_what_is_compared() -> None:
    found = autopar.plan_layouts(
        model(), batch(), A100, devices=2, global_batch=8, compare={"ours": Layout(data=2, microbatch=4)},
        options=Options(stages=2, zero=0, recompute="full", precision="fp32", optimizer="sgd"),
    )  # fmt: skip
    assert (found.plan.stages, found.plan.batch, found.plan.precision) == (2, 8, "fp32") and found.plan.recomputed
    ours = found.named["ours"].plan
    assert (ours.stages, ours.batch, ours.precision, ours.recomputed) == (1, 8, "bf16", ())
    assert found.plan.predicted.optimizer_bytes == ours.predicted.optimizer_bytes == 0
    assert found.checkpoint_bytes == 4 * found.parameters and found.days(found.plan) is None


def test_common_options_have_keywords_of_their_own() -> None:
    found = autopar.plan_layouts(
        layers(), (torch.zeros(8, 16),), A100, devices=2, loss_fn=summed, options=Options(stages=1, zero=0),
        precision="fp32", memory_limit=1 << 30, zero=3,
    )  # fmt: skip
    options = Options(stages=1, zero=3, precision="fp32", memory_limit=1 << 30)
    plan = autopar.plan(layers(), (2,), (torch.zeros(8, 16),), cluster=A100, options=options, loss_fn=summed)
    assert (found.plan.lines, found.plan.precision, found.plan.memory_limit) == (plan.lines, "fp32", 1 << 30)


def test_a_layout_for_comparison_that_does_not_fit_is_marked() -> None:
    found = autopar.plan_layouts(
        layers(), (torch.zeros(16, 16),), A100, devices=2, loss_fn=summed,
        compare={"ours": Layout(microbatch=8, data=2)}, options=Options(stages=1),
    )  # fmt: skip
    priced = found.named["ours"]
    small = autopar.Priced(priced.plan, priced.layout, priced.predicted.peak_bytes - 1, priced.flops_per_second)
    text = str(dataclasses.replace(found, named={"ours": small}))
    assert "! does not fit: ours by up to 1 B" in text
    known = dataclasses.replace(small, memory_limit=10, needed_bytes=2058)
    assert "! does not fit: ours by 2 KiB" in str(dataclasses.replace(found, named={"ours": known}))
    # The quickest plan may hold less than the smallest that was looked for: it is the table's bound as well.
    less = dataclasses.replace(small, needed_bytes=priced.predicted.peak_bytes + (4 << 10))
    assert less.excess_bytes == less.row.excess_bytes == 1
    assert "! does not fit: ours by 1 B" in str(dataclasses.replace(found, named={"ours": less}))


def test_pins_go_where_a_layout_contradicts_them() -> None:
    pins, data, tensor = {"0.weight": "R"}, Layout(data=2, microbatch=8), Layout(tensor=2, microbatch=16)
    found = autopar.plan_layouts(
        layers(), (torch.zeros(16, 16),), A100, devices=2, loss_fn=summed, options=Options(stages=1, pins=pins),
        compare={"data": data, "tensor": tensor},
    )  # fmt: skip
    assert found.named["data"].plan.pinned == pins and not found.named["data"].notes
    assert found.named["tensor"].plan.pinned == {}
    assert f"pins that {tensor} contradicts are left out: 0.weight" in found.named["tensor"].notes
    assert "are left out: 0.weight" in str(found)


def test_the_model_stays_as_it_is() -> None:
    found = autopar.plan_layouts(layers(), (torch.zeros(8, 16),), A100, devices=2, loss_fn=summed)
    assert all(parameter.dtype == torch.float32 for parameter in layers().parameters())
    assert found.plan.precision == "bf16"


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        (1, (1,)),
        (8, (8,)),
        (ONE_AXIS, (ONE_AXIS,)),
        (2 * ONE_AXIS, (ONE_AXIS // 4, 8)),
        (1024, (128, 8)),
        (100, (100,)),
    ],
)
def test_nodes_are_an_axis_of_large_meshes(devices: int, mesh: tuple[int, ...]) -> None:
    assert mesh_for(A100, devices) == mesh


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"devices": 0}, "devices=0: not a positive whole number"),
        ({"devices": 4.0}, "devices=4.0: not a positive whole number"),
        ({"global_batch": -8}, "global_batch=-8: not a positive"),
        ({"tokens": float("nan")}, "tokens=nan: not a positive number"),
        ({"tokens": "1e9"}, "tokens='1e9'"),
        ({"compare": {"ours": "data=4"}}, "give names and an autopar.Layout of each"),
        ({"compare": [Layout(data=4, zero=1)]}, r"^compare=\[Layout\(data=4, zero=1\)\]: give names"),
        ({"compare": {"ours": Layout(data=8)}}, "ours: .* takes 8 devices, not 4"),
        ({"compare": {"ours": Layout(data=4, microbatch=3)}}, "a microbatch of [24] does"),
        ({"compare": {"ours": Recipe(data=4)}}, "layout is a Recipe"),
        ({"options": {"zero": 1}}, "is not autopar.Options"),
        ({"options": Options(mode="inference")}, "days and checkpoints are of training; ask autopar.plan"),
        ({"options": Options(sync=autopar.LocalSGD(4))}, "plans of replicas need a mesh of them"),
        ({"stages": 2}, "plan_layouts has no argument 'stages'"),
    ],
)
def test_arguments_that_are_none(named: dict[str, object], said: str) -> None:
    arguments: dict[str, Any] = {"devices": 4, "loss_fn": summed, **named}
    with pytest.raises(AutoparError, match=said):
        autopar.plan_layouts(layers(), (torch.zeros(16, 16),), "dgx-a100-80gb", **arguments)


def test_more_devices_than_a_cluster_has() -> None:
    with pytest.raises(AutoparError, match="devices=16: dgx-a100-80gb has 8"):
        autopar.plan_layouts(layers(), (torch.zeros(16, 16),), A100.of_devices(8), devices=16, loss_fn=summed)


def test_other_arguments_are_options() -> None:
    with pytest.raises(ArgumentError, match=r"its arguments are .*options"):
        autopar.plan_layouts(layers(), (torch.zeros(16, 16),), A100, devices=2, schedule="1f1b")  # type: ignore[call-arg]
