"""A layout restricts the search: its plans are what it says, equal one process, and what is impossible is explained."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Options, Plan
from autopar.errors import InfeasibleError, OptionsError, PlanMismatchError
from autopar.layout import Layout
from autopar.planner.options_of_plan import options_under
from autopar.planner.timings import Timings
from autopar.plans.views.quantities import size
from autopar.search.best_plan import best_plan
from benchmarks.layout_grid import batch, checked, collectives, model_of, rows, wrong
from benchmarks.recipes import Recipe
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import Case
from tests.helpers.planning import planned, requested
from tests.helpers.run_plan import Bench

FAR = 3e-6


def llama() -> Case:
    return model_of("llama", 2), batch()


def mixture() -> Case:
    return model_of("mixture", 2), batch()


@cache
def bench(name: str) -> tuple[Bench, dict[str, torch.Tensor]]:
    """The model ``name``, on which plans run, and what one process computes."""
    run = Bench(model_of(name, 2), batch())
    return run, run.expected()


def plan_of(name: str, devices: int, **fields: Any) -> Plan:
    source = {"llama": llama, "mixture": mixture}[name]
    return planned(source, (devices,), layout=Layout(**fields))


def farthest(plan: Plan, name: str) -> float:
    """The largest relative difference of the loss and the gradients of a simulated step from those of one process."""
    run, expected = bench(name)
    found = run.run(plan)
    assert found.keys() == expected.keys()
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 4, {"tensor": 2, "pipeline": 2, "microbatch": 2, "interleave": 2, "recompute": "full", "zero": 1}),
    ("llama", 2, {"context": 2, "zero": 3}),
    ("mixture", 2, {"data": 2, "expert": 2}),
]


def test_what_is_not_as_asked_for_is_noticed() -> None:
    """As the tests below would, were a field of the layout not heard."""
    free = planned(llama, (2,), layout=Layout(data=2, zero=0, recompute="none"))
    for fields in ({"zero": 1}, {"zero": 3}, {"recompute": "full"}, {"schedule": "1f1b", "pipeline": 2}, {"tensor": 2}):
        assert wrong(free, Layout(**fields)), fields  # type: ignore[arg-type]
    sharded = replace(free, parameters=plan_of("llama", 2, data=2, zero=3).parameters)
    assert wrong(sharded, Layout(zero=3)) == [] and wrong(sharded, Layout(zero=0)) == []
    assert wrong(replace(free, recomputed=("add",)), Layout(recompute="none"))


@pytest.mark.parametrize(("name", "devices", "fields"), slow_rows_but([1], CASES), ids=str)
def test_plans_are_as_the_layout_says_and_equal_one_process(name: str, devices: int, fields: dict[str, Any]) -> None:
    plan = plan_of(name, devices, **fields)
    assert wrong(plan, Layout(**fields)) == []
    assert farthest(plan, name) <= FAR
    assert plan.layout == Layout(**fields).restriction
    assert f"layout {plan.layout}" in str(plan)


def test_sequence_parallelism_decides_what_is_between_products() -> None:
    whole, divided = (plan_of("llama", 2, tensor=2, sequence_parallel=on) for on in (False, True))
    assert "reduce_scatter" not in collectives(whole, "tp")
    assert "reduce_scatter" in collectives(divided, "tp")
    assert not {"all_reduce", "all_to_all"} & collectives(divided, "tp")
    norms = [path for path in divided.outputs if path.endswith("input_layernorm")]
    assert norms and all(str(divided.outputs[path][0]) == "S(1)" for path in norms)
    assert all(str(whole.outputs[path][0]) == "R" for path in norms)
    for plan in (whole, divided):
        assert farthest(plan, "llama") <= FAR


def test_a_plan_file_keeps_the_restriction() -> None:
    plan = plan_of("llama", 2, context=2, zero=3)
    assert plan.layout == "context=2 zero=3"
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    free = replace(plan, layout="")
    assert '"layout"' not in free.to_json()
    assert Plan.from_json(free.to_json()) == free
    assert "context=2 zero=3" in str(plan.diff(free))
    assert "under the layout context=2 zero=3" in str(plan.why("model.lm_head.weight"))


def test_what_is_given_is_remembered() -> None:
    layout = Layout(tensor=2, data=1)
    assert layout.given == ("tensor", "data")
    assert replace(layout, pipeline=2).given == ("tensor", "pipeline", "data")
    assert Layout.parse("tensor=2,data=1").given == layout.given
    assert layout == Layout(tensor=2)
    options = Options(layout=Layout(pipeline=2, zero=1, recompute="full", schedule="gpipe"))
    assert (options.stages, options.zero, options.recompute, options.schedule) == (2, 1, "full", "gpipe")
    assert replace(options, layout=Layout(pipeline=4)).stages == 4
    assert replace(options, layout=None) == Options()
    assert replace(options, time_limit=1.0).zero == 1
    for change in ({"stages": 4}, {"zero": 3}):
        with pytest.raises(OptionsError, match="contradict each other"):
            replace(options, **change)  # type: ignore[arg-type]
    assert replace(Options(stages=2, layout=Layout(pipeline=2)), layout=None).stages == 2, "the user gave it too"
    assert Layout(tensor=2, schedule=None).restriction == "tensor=2"
    with pytest.raises(OptionsError, match="tensor is given twice"):
        Layout.parse("tensor=2 tensor=4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "tensor=2"}, "is not an autopar.Layout"),
        ({"layout": Recipe(tensor=2)}, "layout is a Recipe: .* give an autopar.Layout"),
        ({"stages": 2, "layout": Layout(pipeline=4)}, r"stages=2, layout=Layout\(pipeline=4\)\) contradict"),
    ],
)
def test_layouts_that_restrict_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        Options(**options)


@pytest.mark.parametrize(
    ("name", "devices", "fields", "said"),
    [
        (
            "llama",
            8,
            {"tensor": 3},
            "has 4 heads, which do not divide among 3 tensor ranks; tensor=2 or tensor=4 would do",
        ),
        (
            "llama",
            6,
            {"tensor": 4},
            "tensor=4 = 4 devices, but the mesh (6,) has 6 (degrees that are left out are searched); tensor=2 would",
        ),
        (
            "llama",
            8,
            {"tensor": 2, "data": 2, "pipeline": 1, "context": 1},
            "tensor=4 or context=2 or data=4 or pipeline=2 would do",
        ),
        (
            "llama",
            8,
            {"pipeline": 3},
            "pipeline=3 = 3 devices, but the mesh (8,) has 8 (degrees that are left out are searched); pipeline=2 or",
        ),
        ("llama", 3, {"data": 3}, "a batch of 8 does not divide among 3 data ranks; data=1 would do"),
        (
            "llama",
            4,
            {"data": 4, "microbatch": 4},
            "which do not divide into microbatches of 4; data=2 or microbatch=2 would do",
        ),
        (
            "llama",
            3,
            {"context": 3},
            "a sequence of 16 (dim 1), which does not divide among 3 context ranks; context=1 would do",
        ),
        ("llama", 2, {"expert": 2}, "the model has no block of experts that can be divided"),
        ("llama", 6, {"tensor": 3}, "has 4 heads, which do not divide among 3 tensor ranks; tensor=2 would do"),
        ("llama", 8, {"tensor": 3, "data": 4}, "which do not divide among 3 tensor ranks; tensor=2 would do"),
        ("llama", 6, {"tensor": 3, "data": 2}, "which do not divide among 3 tensor ranks; tensor=1 would do"),
        ("llama", 64, {"pipeline": 64}, "in 2 layers of 'model.model.layers'; pipeline=16 on 64 devices would do"),
        ("llama", 4, {"pipeline": 64}, "in 2 layers of 'model.model.layers'; pipeline=4 on 4 devices would do"),
        ("llama", 8, {"tensor": 5, "data": 5, "microbatch": 2}, "among 5 tensor ranks; tensor=4 data=2 would do"),
        ("llama", 8, {"context": 5, "data": 3}, "among 5 context ranks; context=4 data=2 would do"),
        ("mixture", 4, {"data": 3, "expert": 3}, "among 3 expert ranks; data=4 expert=4 would do"),
        (
            "mixture",
            8,
            {"expert": 3},
            "has 4 experts, which do not divide among 3 expert ranks; expert=2 or expert=4 would",
        ),
        ("mixture", 6, {"expert": 3}, "has 4 experts, which do not divide among 3 expert ranks; expert=2 would do"),
        ("llama", 4, {"pipeline": 4, "interleave": 99}, "not 4 x 99; with 4 stages interleave="),
        (
            "llama",
            4,
            {"pipeline": 2, "interleave": 3, "schedule": "gpipe"},
            "'gpipe' runs 1 chunk on each stage; take interleave=1, or leave one of them out",
        ),
        (
            "llama",
            2,
            {"interleave": 1, "schedule": "zb-v"},
            "'zb-v' runs 2 chunks on each stage; take interleave=2, or leave one of them out",
        ),
        (
            "llama",
            2,
            {"interleave": 1, "schedule": "interleaved"},
            "'interleaved' runs 2 or 3 or 4 chunks on each stage; take interleave=2, or leave one of them out",
        ),
    ],
    ids=str,
)
def test_what_does_not_divide_is_explained(name: str, devices: int, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError, match=re.escape(said)):
        plan_of(name, devices, **fields)


class Features(nn.Module):
    """Samples of features, without a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def features() -> Case:
    torch.manual_seed(0)
    return Features(), (torch.randn(8, 32),)


@pytest.mark.parametrize(("devices", "tensor", "would_do"), [(128, 128, 64), (60, 60, 10), (8, 8, None)], ids=str)
def test_more_tensor_ranks_than_a_matrix_has_shards_are_refused(
    devices: int, tensor: int, would_do: int | None
) -> None:
    """64 rows in 60 shards: pieces of two, of which 28 would be empty."""
    layout = Layout(tensor=tensor)
    if would_do is None:
        assert planned(features, (devices,), layout=layout).mesh == (devices,)
        return
    said = f"'up.weight' f32[64, 32] has no dim with a piece for each; tensor={would_do} would do"
    with pytest.raises(OptionsError, match=re.escape(said)):
        planned(features, (devices,), layout=layout)
    assert planned(features, (devices,), layout=Layout(tensor=would_do)).predicted.step_seconds > 0


def test_a_sequence_that_is_none_is_refused() -> None:
    """Dim 1 of the input are features: products sum over them."""
    with pytest.raises(OptionsError, match=r"is not one: up .* sums over it"):
        planned(features, (2,), layout=Layout(context=2))
    with pytest.raises(OptionsError, match="no product computes one row for each position"):
        planned(features, (2,), layout=Layout(tensor=2, sequence_parallel=True))


def test_what_does_not_fit_says_by_how_much_and_what_does() -> None:
    layout = Layout(data=2, zero=0)
    needed = planned(features, (2,), layout=layout, offload=False).predicted.peak_bytes
    limit = needed * 3 // 4
    with pytest.raises(InfeasibleError) as caught:
        planned(features, (2,), layout=layout, memory_limit=limit, offload=False)
    found = re.search(r"needs (\d+) bytes per device, (\d+) .* more than the limit of (\d+)", str(caught.value))
    assert found and int(found[1]) - int(found[2]) == int(found[3]) == limit
    assert "A single change that fits: zero=3 (" in str(caught.value)
    assert "What would lower it" not in str(caught.value), "one list of advice"
    changed = planned(features, (2,), layout=Layout(data=2, zero=3), memory_limit=limit, offload=False)
    assert changed.predicted.peak_bytes <= limit
    assert f"zero=3 ({size(changed.predicted.peak_bytes)}, " in str(caught.value), "as rehearsed, not as counted"


class Scaled(nn.Module):
    """A block that scales and casts what its product gives: through both a sum may stay partial."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + (0.5 * self.down(self.up(self.norm(x)).relu()) / 3.0).to(torch.float32)
        return self.norm(x).square().mean()


def scaled() -> Case:
    torch.manual_seed(0)
    return Scaled(), (torch.randn(8, 16, 32),)


def test_a_scaled_sum_is_scattered_too() -> None:
    plan = planned(scaled, (2,), layout=Layout(tensor=2, sequence_parallel=True))
    assert "all_reduce" not in collectives(plan, "tp") and "reduce_scatter" in collectives(plan, "tp")


def test_names_and_pins_keep_their_axes() -> None:
    request = requested(features, (2, 2), layout=Layout(tensor=2, data=2), mesh_search=True)
    with pytest.raises(OptionsError, match=r"needs axes \(dp 2, tp 2\), outermost first, but the mesh is \(2, 2\) ca"):
        best_plan(replace(request, axis_names=("tp", "dp")), Timings())
    assert best_plan(replace(request, axis_names=("dp", "tp")), Timings()).axis_names == ("dp", "tp")
    with pytest.raises(OptionsError, match="chunks of layers take turns on pipeline stages, but stages=1"):
        planned(features, (2,), stages=1, layout=Layout(interleave=2))
    with pytest.raises(OptionsError, match=r"but the mesh is \(2, 4\) and pins refer to its axes"):
        planned(features, (2, 4), pins={"up.weight": "S(0),R"}, layout=Layout(tensor=2, data=4))


def test_options_beside_a_plan_do_not_ask_for_another() -> None:
    plan = plan_of("llama", 2, context=2, zero=3)
    assert options_under(Options(layout=Layout(context=2, zero=3), timeout=5.0), plan).precision == "fp32"
    for fields, said in (
        ({"stages": 2}, "stages=2) is asked for, but the plan that is given has stages=1"),
        ({"microbatches": 4}, "microbatches=1"),
        ({"schedule": "1f1b"}, "schedule=None"),
        ({"pins": {"model": "R"}}, "pins={}"),
        ({"layout": Layout(tensor=2)}, "the layout 'context=2 zero=3'"),
        ({"memory_limit": 1000}, f"a peak of {plan.predicted.peak_bytes} bytes"),
        ({"precision": "bf16"}, "the plan was made for precision='fp32'"),
    ):
        with pytest.raises(PlanMismatchError, match=re.escape(said)):
            options_under(Options(**fields), plan)  # type: ignore[arg-type]
    free = plan_of("llama", 2, data=2, zero=0)
    for name, value, said in (("zero", 3, "state on every device"), ("offload", True, "the memory of devices")):
        with pytest.raises(PlanMismatchError, match=said):
            options_under(Options(**{name: value}), free)  # type: ignore[arg-type]
    for made in (plan, free):
        zero = 3 if made is plan else 0
        assert options_under(Options(zero=zero, offload=False, recompute="full"), made).zero == zero  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_is_left_out_is_searched() -> None:
    """A restriction by one degree is no slower than by all, whatever the others are."""
    least = plan_of("llama", 4, tensor=2).predicted.step_seconds
    for others in ({"data": 2}, {"context": 2}, {"pipeline": 2}):
        assert least <= 1.011 * plan_of("llama", 4, tensor=2, **others).predicted.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), list(rows()), ids=str)
def test_processes_agree(name: str, fields: dict[str, Any]) -> None:
    row = checked(name, fields)
    assert row["ok"] and not row["unpriced"] and not row["wrong"], row


def test_training_under_a_layout() -> None:
    """The grid has many layouts on processes; here one is trained, its optimizer state in shards."""
    report = autopar.verify(
        model_of("llama", 2), 2, batch(), options=Options(layout=Layout(tensor=2, zero=1)), steps=3, timeout=120,
        cluster="dgx-a100-80gb",
    )  # fmt: skip
    assert report.ok, str(report)
    assert wrong(report.plan, Layout(tensor=2, zero=1)) == []
