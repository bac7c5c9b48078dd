"""What is said of a layout that does not fit: the bytes that are missing, and single changes that fit as planned."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.errors import InfeasibleError, OptionsError
from autopar.layout import Layout
from autopar.planner.request import PlanRequest
from autopar.search.restricted.changes import changes
from autopar.search.restricted.never_fits import at_rest_in_layout, least_at_rest, resting
from tests.helpers.models import Case
from tests.helpers.planning import planned, requested


class Layers(nn.Module):
    """Layers whose weights are far larger than what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def layers() -> Case:
    torch.manual_seed(0)
    return Layers(), (torch.randn(8, 64),)


def wide_head() -> Case:
    """A Llama whose vocabulary is large beside its width."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
        vocab_size=50257, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 50257, (8, 32))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def under(layout: Layout, devices: int = 4, **options: Any) -> PlanRequest:
    free = {"mesh_search": True, "stages": None, "microbatches": None}
    return requested(layers, (devices,), layout=layout, offload=False, **{**free, **options})


def refused(layout: Layout, limit: int, devices: int = 4) -> str:
    with pytest.raises(InfeasibleError) as caught:
        planned(layers, (devices,), layout=layout, memory_limit=limit, offload=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "weights", "gradients", "state"),
    [
        ({"data": 4, "zero": 0}, 1, 1, 1),
        ({"data": 4, "zero": 1}, 1, 1, 4),
        ({"data": 4, "zero": 2}, 1, 4, 4),
        ({"data": 4, "zero": 3}, 4, 4, 4),
        ({"data": 2, "tensor": 2, "zero": 0}, 2, 2, 2),
        ({"data": 2, "pipeline": 2, "zero": 1}, 2, 2, 4),
        ({"data": 2, "tensor": 1, "zero": 0}, 2, 2, 2),  # Two stages are possible.
        ({"tensor": 4}, 4, 4, 4),
        ({"data": 4}, 4, 4, 4),
    ],
    ids=str,
)
def test_what_rests_on_a_device_under_a_layout(fields: Any, weights: int, gradients: int, state: int) -> None:
    request = under(Layout(**fields))
    of = resting(request)
    expected = of["weights"] / weights + of["gradients"] / gradients + of["state"] / state
    assert at_rest_in_layout(request) == expected >= least_at_rest(request)


def named(layout: Layout, limit: int) -> list[str]:
    return [change.text for change in changes(under(layout, memory_limit=limit), layout)]


def test_changes_are_of_fields_that_were_given_and_of_degrees_for_others() -> None:
    rests = at_rest_in_layout(under(Layout(data=4, zero=0)))
    assert named(Layout(data=4, zero=0), 3 * rests)[:3] == ["zero=1", "data=2", "degrees left out"]
    given = Layout(data=2, pipeline=2, tensor=1, recompute="none", microbatch=4, sequence_parallel=False)
    found = named(given, 10 * rests)
    assert found[:3] == ['recompute="full"', "microbatch=2", "microbatch=1"]
    assert {"data=1 and tensor=2", "data=1 and pipeline=4", "pipeline=1 and tensor=2"} <= set(found)
    assert "sequence_parallel=True" not in found, "of one tensor rank, which has nothing to divide"


def test_what_can_hardly_fit_comes_last() -> None:
    """Weights, gradients and state of a whole copy are 1.6 times the limit: recomputing cannot help."""
    layout = Layout(data=2, pipeline=2, tensor=1, zero=0, recompute="none")
    limit = at_rest_in_layout(under(layout)) * 5 // 8
    found = changes(under(layout, memory_limit=limit), layout)
    may_fit = [change.may_fit for change in found]
    assert may_fit == sorted(may_fit, reverse=True)
    assert 'recompute="full"' in {change.text for change in found if not change.may_fit}
    assert {"zero=3", "data=1 and tensor=2"} <= {change.text for change in found if change.may_fit}


def test_a_degree_is_exchanged_for_another_one_where_that_fits() -> None:
    layout = Layout(tensor=1, data=2, pipeline=2, recompute="none", zero=0)
    limit = at_rest_in_layout(under(layout)) * 7 // 8
    said = refused(layout, limit)
    missing = re.search(r"needs (\d+) bytes per device, (\d+) .* more than the limit of (\d+)", said)
    assert missing and int(missing[1]) - int(missing[2]) == int(missing[3]) == limit
    fits = re.search(r"A single change that fits: (.*?)\.(?: |$)", said)
    assert fits and "data=1 and tensor=2" in fits[1], said
    for text in re.findall(r"(\S[^;(]*) \(", fits[1]):
        values = dict(pair.split("=") for pair in text.split(" and "))
        other = replace(layout, **{name: int(value) for name, value in values.items()})
        plan = planned(layers, (4,), layout=other, memory_limit=limit, offload=False)
        assert plan.predicted.peak_bytes <= limit


def test_of_changes_that_leave_stages_open_those_that_were_found_are_named() -> None:
    layout = Layout(data=4, zero=0)
    limit = at_rest_in_layout(under(layout)) * 5 // 8
    said = refused(layout, limit)
    named = re.findall(r"(\w+)=(\d) \([^)]*, with pipeline=(\d)\)", said)
    assert named, said
    for field, value, stages in named:
        other = replace(layout, **{field: int(value), "pipeline": int(stages)})
        plan = planned(layers, (4,), layout=other, memory_limit=limit, offload=False)
        assert plan.stages == int(stages) and plan.predicted.peak_bytes <= limit


def test_devices_that_cannot_hold_the_model_are_said_to_be_too_few() -> None:
    layout = Layout(data=2, zero=0)
    limit = least_at_rest(under(layout, devices=2)) * 3 // 4
    said = refused(layout, limit, devices=2)
    assert "No layout fits on these devices: divided evenly among all 2, weights, gradients and optimizer state" in said
    assert "for these to fit, take 3 devices or more or an optimizer with less state or offload=None or True" in said
    assert "single change" not in said


def test_what_is_no_field_of_the_layout_is_named_where_no_field_helps() -> None:
    layout = Layout(data=2, zero=3)
    limit = least_at_rest(under(layout, devices=2)) * 21 // 20
    said = refused(layout, limit, devices=2)
    assert "No single change of it" in said and "What else would lower it: " in said


def test_a_schedule_without_stages_is_refused_in_the_words_of_the_layout() -> None:
    with pytest.raises(OptionsError, match=r"but pipeline=1: leave schedule out, or take pipeline=2 or more$"):
        planned(layers, (4,), layout=Layout(pipeline=1, data=4, schedule="1f1b"))


@pytest.mark.slow
def test_a_limit_in_which_less_than_the_average_counts_is_no_limit_of_stages() -> None:
    """What a program counts of both stages is more than they hold by so much that nothing seems to fit: within what one
    plan holds, there is one."""
    of_stages: dict[str, Any] = {"pipeline": 2, "microbatch": 1, "schedule": "1f1b", "interleave": 1}
    layout = Layout(data=2, tensor=1, recompute="none", zero=0, precision="bf16", **of_stages)
    case: dict[str, Any] = {"layout": layout, "offload": False}
    larger = planned(wide_head, (4,), **case).predicted.peak_bytes
    peak = planned(wide_head, (4,), memory_limit=larger * 97 // 100, **case).predicted.peak_bytes
    assert planned(wide_head, (4,), memory_limit=peak, **case).predicted.peak_bytes <= peak < larger
