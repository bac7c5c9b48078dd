"""The price of a layout is its plan."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster.groups import Group
from autopar.cost import usable_bytes
from autopar.errors import ArgumentError, InfeasibleError, OptionsError
from autopar.layout import Layout
from autopar.plans.views.quantities import size
from autopar.search import best_plan
from benchmarks.recipes import Recipe
from tests.helpers.marks import slow_but, slow_rows_but
from tests.helpers.models import Stack, text

from .models import A100, BATCH, batch, model, summed


@cache
def priced(name: str, layout: Layout) -> autopar.Priced:
    return autopar.price(model(name), batch(), A100, layout=layout)


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_rows_but(
        (0,),
        [
            ("gpt", Layout(tensor=2, data=2, zero=1, microbatch=8)),
            ("gpt", Layout(pipeline=2, tensor=2, data=2, microbatch=2, sequence_parallel=True, recompute="full")),
            ("llama", Layout(pipeline=2, interleave=2, data=2, microbatch=4, zero=2)),
            ("llama", Layout(context=2, tensor=2, microbatch=8, precision="fp16")),
            ("mixture", Layout(data=4, expert=2, microbatch=4, zero=3, recompute="selective")),
            ("mixture", Layout(data=2, tensor=2, microbatch=8, precision="fp32")),
        ],
    ),
)
def test_a_price_is_that_of_the_plan_it_restricts_to(name: str, layout: Layout) -> None:
    """Line by line, and whichever mesh of so many devices the plan is asked for."""
    found = priced(name, layout)
    options = autopar.Options(layout=found.layout)
    plan = autopar.plan(model(name), (layout.devices,), batch(), cluster=A100, options=options)
    assert found.plan.lines == plan.lines
    assert (found.plan.predicted, found.plan.holdings) == (plan.predicted, plan.holdings)
    assert sum(line.seconds for line in plan.lines) > 0 and found.predicted == plan.predicted
    assert found.fits and found.excess_bytes == plan.predicted.peak_bytes - plan.memory_limit < 0


def test_fields_left_out_have_their_defaults() -> None:
    """``Options(layout=...)`` alone would search them."""
    found = priced("gpt", Layout(tensor=2, data=2, zero=1, microbatch=8))
    assert found.layout == Layout(tensor=2, data=2, zero=1, microbatch=8)
    assert "pipeline=1 data=2 context=1 expert=1" in found.plan.layout and "recompute=none" in found.plan.layout
    assert (found.plan.stages, found.plan.microbatches, found.plan.precision) == (1, 1, "bf16")
    assert found.batch == BATCH and found.cluster == A100.name


@pytest.mark.slow
def test_a_pipeline_has_the_schedule_of_its_layout() -> None:
    for interleave, schedule in ((1, "1f1b"), (2, "interleaved")):
        layout = Layout(pipeline=2, data=2, interleave=interleave, microbatch=4)
        found = priced("gpt", layout)
        assert found.plan.schedule == found.layout.schedule == schedule


def test_a_priced_layout_prints_what_matters() -> None:
    found = priced("gpt", Layout(tensor=2, data=2, zero=1, microbatch=8))
    lines = str(found).splitlines()
    assert lines[0] == "tensor=2 data=2 microbatch=8 zero=1"
    assert lines[1] == f"on 4 devices of {A100.name}, batch {BATCH}, bf16"
    assert "TFLOP/s per device, MFU" in lines[2] and "per device: fits" in lines[3]
    assert lines[-1] == "print(priced.plan) shows the plan"


def test_flops_per_second_are_those_of_the_mfu() -> None:
    found = priced("gpt", Layout(tensor=2, data=2, zero=1, microbatch=8))
    assert found.flops_per_second == found.predicted.mfu * A100.device.flops(torch.bfloat16)


@pytest.mark.parametrize(
    "layout", slow_but([Layout(microbatch=BATCH)], [Layout(microbatch=BATCH), Layout(pipeline=2, data=2)])
)
def test_a_layout_that_does_not_fit_says_by_how_many_bytes(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned once more, and nothing else is: no changes that would fit are searched for."""

    def fail(*_: object) -> None:
        raise AssertionError("a search for advice")

    monkeypatch.setattr(best_plan, "layout_infeasible", fail)
    monkeypatch.setattr("autopar.planner.infeasible.infeasible", fail)
    limit = 1 << 20
    found = autopar.price(model(), batch(), A100, layout=layout, options=autopar.Options(memory_limit=limit))
    free = priced("gpt", layout)
    assert not found.fits and found.memory_limit == limit
    assert found.predicted == free.predicted and found.plan.memory_limit == limit
    if layout.pipeline == 1:  # The smallest plan that was found, which does fit into its bytes.
        assert found.needed_bytes is not None and found.needed_bytes <= free.predicted.peak_bytes
        assert found.excess_bytes == found.needed_bytes - limit
        assert f"needs {size(found.needed_bytes)}, {found.excess_bytes} bytes" in str(found)
    else:
        assert found.needed_bytes is None and found.excess_bytes == free.predicted.peak_bytes - limit
        assert f"does not fit: at most {found.excess_bytes} bytes" in str(found)


def test_a_layout_fits_only_if_its_plan_does() -> None:
    """Within what the first error names none may be found, since a step in microbatches holds more than is counted."""
    stack, inputs, layout = Stack(layers=2, width=16, hidden=32), text(8, 8), Layout(tensor=2, microbatch=2)
    needed = autopar.price(
        stack, inputs, A100, layout=layout, options=autopar.Options(memory_limit=20_000)
    ).needed_bytes
    found = autopar.price(stack, inputs, A100, layout=layout, options=autopar.Options(memory_limit=needed))
    assert needed is not None and found.fits is (found.predicted.peak_bytes <= needed)


@pytest.mark.slow
def test_unequal_devices_have_limits_of_their_own() -> None:
    """Options that allow more leave them as they are, so that what does not fit is planned for larger devices."""
    smaller = dataclasses.replace(A100.device, memory_bytes=A100.device.memory_bytes // 2)
    cluster = A100.with_groups(Group(1, A100.device), Group(1, smaller))
    layout, limit = Layout(data=2, microbatch=8), 1 << 20
    found = autopar.price(model(), batch(), cluster, layout=layout, options=autopar.Options(memory_limit=limit))
    assert not found.fits and found.memory_limit == limit
    assert found.excess_bytes == found.predicted.peak_bytes - limit > 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 24 << 20])
def test_stages_that_do_not_fit_keep_the_limits_of_their_devices(limit: int | None) -> None:
    """A training under the plan measures each stage by its own."""
    room = A100.device.memory_bytes - usable_bytes(A100)
    large, small = (dataclasses.replace(A100.device, memory_bytes=room + each) for each in (32 << 20, 16 << 20))
    kinds = [dataclasses.replace(each, reserve_bytes=room, reserve_fraction=0.0) for each in (large, small)]
    cluster = A100.with_groups(*(Group(1, each) for each in kinds))
    options = autopar.Options(memory_limit=limit)
    layout = Layout(pipeline=2, microbatch=4)
    found = autopar.price(model(), batch(), cluster, layout=layout, options=options)
    assert not found.fits and found.memory_limit == 16 << 20
    assert found.plan.stage_limits == (limit or 32 << 20, 16 << 20)


@pytest.mark.parametrize(
    ("dtype", "layout", "precision", "shown"),
    [
        (torch.float32, Layout(microbatch=BATCH), "bf16", "bf16"),
        (torch.float32, Layout(microbatch=BATCH, precision="fp32"), "fp32", "fp32"),
        (torch.bfloat16, Layout(microbatch=BATCH), "fp32", "bf16"),
        (torch.bfloat16, Layout(microbatch=BATCH, precision="bf16"), "fp32", "bf16"),
        (torch.float16, Layout(microbatch=BATCH), "fp32", "fp16"),
    ],
)
@pytest.mark.slow
def test_a_model_is_planned_in_the_precision_of_the_layout(
    dtype: torch.dtype, layout: Layout, precision: str, shown: str
) -> None:
    """By masters in fp32, or as it is where it is in that precision; ``"fp32"`` of a plan leaves the dtypes alone."""
    found = autopar.price(model("gpt", dtype), batch(), A100, layout=layout)
    assert (found.plan.precision, found.layout.precision) == (precision, shown)
    assert 0 < found.predicted.mfu < 1
    elements = sum(parameter.numel() for parameter in model().parameters())
    assert sum(held.bytes for held in found.plan.holdings if held.kind == "optimizer") == 2 * elements * dtype.itemsize


def test_a_model_in_another_dtype_says_so() -> None:
    with pytest.raises(OptionsError, match=r"precision='fp16' computes with copies of float32 parameters"):
        autopar.price(model("gpt", torch.bfloat16), batch(), A100, layout=Layout(precision="fp16"))


@pytest.mark.slow
def test_options_of_a_plan_are_those_of_a_price() -> None:
    options = autopar.Options(optimizer="sgd", pins={"layers.0": "stage 0", "layers.3": "stage 1"})
    found = autopar.price(model(), batch(), A100, layout=Layout(pipeline=2, microbatch=4), options=options)
    assert found.predicted.optimizer_bytes == 0 and found.plan.pinned == options.pins


def test_errors_name_the_fields_that_somebody_wrote() -> None:
    with pytest.raises(OptionsError, match=r"^Layout\(tensor=3, zero=1\): "):
        autopar.price(model(), batch(), A100, layout=Layout(tensor=3, zero=1, data=1))


def test_targets_and_a_loss_function() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)))
    found = autopar.price(layers, (torch.zeros(8, 16),), A100, layout=Layout(data=2, microbatch=4), loss_fn=summed)
    loss = torch.nn.MSELoss()
    other = autopar.price(
        layers,
        (torch.zeros(8, 16),),
        A100,
        layout=Layout(data=2, microbatch=4),
        loss_fn=loss,
        targets=torch.zeros(8, 16),
    )
    assert found.fits and other.fits


def test_products_without_a_rate_are_said_to_be_priced_as_the_slowest() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)))
    v100, rows = autopar.Cluster.get("p3.16xlarge"), (torch.zeros(8, 16),)
    note = "a V100-SXM2-16GB has no rate of products in bf16: they are priced as f64, its slowest"
    found = autopar.price(layers, rows, v100, layout=Layout(data=2), loss_fn=summed)
    assert note in found.notes[0] and f"! {note}" in str(found)
    report = autopar.plan_layouts(layers, rows, v100, devices=2, loss_fn=summed)
    assert note in report.notes[0] and f"! {note}" in str(report)
    assert not autopar.price(layers, rows, v100, layout=Layout(data=2, precision="fp16"), loss_fn=summed).notes


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        ({"tensor": 2}, {}, r"not an autopar.Layout; write layout=autopar.Layout\(tensor=2, data=4\)"),
        (Recipe(tensor=2), {}, r"layout is a Recipe: prices are those of plans.*benchmarks.recipes"),
        (Layout(interleave=2), {}, "pipeline=1 has none; take interleave=1, or pipeline=2"),
        (Layout(data=3), {}, "a batch of 16 does not divide among 3 data ranks; data=2 on 2 devices or data=4 on 4"),
        (Layout(data=2, microbatch=3), {}, "microbatches of 3; microbatch=2 or microbatch=4 would do"),
        (Layout(tensor=3), {}, "8 heads, which do not divide among 3 tensor ranks"),
        (Layout(pipeline=64), {}, "in 4 layers of 'layers'; pipeline=16 on 16 devices would do"),
        (Layout(context=3), {}, "context=2 on 2 devices or context=4 on 4 devices would do"),
        (Layout(data=2), {"zero": 1}, r"zero=1.* is said by the layout: write layout=Layout\(zero=1\)"),
        (Layout(data=2), {"stages": 2}, r"stages=2.* is said by the layout: write layout=Layout\(pipeline=2\)"),
        (Layout(data=2), {"microbatches": 2}, r"write layout=Layout\(microbatch=\.\.\.\)"),
        (Layout(data=2), {"layout": Layout(data=2)}, r"options have a layout too: give one of them"),
        (Layout(data=2), {"mode": "inference"}, r"mode='inference'.*: prices are of training.*ask autopar.plan"),
    ],
)
def test_what_cannot_be_priced_is_refused(layout: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        autopar.price(model(), batch(), A100, layout=layout, options=autopar.Options(**options))


def test_other_arguments_that_are_none() -> None:
    with pytest.raises(OptionsError, match=r"options=\{'zero': 1\} is not autopar.Options"):
        autopar.price(model(), batch(), A100, layout=Layout(), options={"zero": 1})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no argument 'limit'"):
        autopar.price(model(), batch(), A100, layout=Layout(), limit=1)  # type: ignore[call-arg]
    with pytest.raises(OptionsError, match="data=16 microbatch=1 takes 16 devices; dgx-a100-80gb has 8"):
        autopar.price(model(), batch(), A100.of_devices(8), layout=Layout(data=16))


def test_what_no_memory_helps_is_an_error() -> None:
    """Host memory that is too small is not the limit of devices."""
    device = dataclasses.replace(A100.device, host_memory_bytes=2**20)
    cluster = dataclasses.replace(A100, device=device)
    with pytest.raises(InfeasibleError, match="host"):
        autopar.price(model(), batch(), cluster, layout=Layout(microbatch=BATCH, offload=True))


class Residual(torch.nn.Module):
    """Small enough to be run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_the_plan_of_a_price_is_any_plan() -> None:
    """It is verified, read from its text, and asked what it would be for another batch; also one that does not fit."""
    module, rows = Residual(), (torch.randn(8, 16),)
    layout = Layout(pipeline=2, data=2, microbatch=2, precision="fp32")
    found = autopar.price(module, rows, A100, layout=layout)
    assert autopar.verify(module, (4,), rows, plan=found.plan).ok
    too_big = autopar.price(module, rows, A100, layout=layout, options=autopar.Options(memory_limit=1000))
    assert autopar.Plan.from_json(too_big.plan.to_json()) == too_big.plan and not too_big.fits
    more = found.plan.whatif(batch=16).answers[-1].plan
    assert more is not None and (more.batch, more.microbatches) == (16, 2 * found.plan.microbatches)
