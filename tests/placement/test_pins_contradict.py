"""Pins that cannot both be had name each other, and the option that they contradict."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import OptionsError
from autopar.ir.placements import short
from autopar.plans.plan import Plan
from tests.helpers.models import Stack, gpt2, text
from tests.helpers.planning import CLUSTER


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"pins": {"0.weight": "S(0),R", "*.weight": "R,R"}},
            "the pin '*.weight': 'R,R' contradicts the pin '0.weight': 'S(0),R'",
        ),
        ({"pins": {"0.weight": "R,R"}, "zero": 3}, "the pin '0.weight': 'R,R' contradicts Options(zero=3)"),
        ({"pins": {"0.weight": "S(7),R"}}, "the pin '0.weight': 'S(7),R' cannot be met"),
    ],
)
def test_what_a_pin_contradicts_is_named(options: dict[str, object], said: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    asked = autopar.Options(mesh_search=False, stages=1, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=re.escape(said)):
        autopar.plan(model, (2, 2), torch.randn(8, 16), options=asked, loss_fn=lambda y: y.sum())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (autopar.Layout(tensor=4), "contradicts Layout(tensor=4): no placement satisfies both"),
        (autopar.Layout(data=4, zero=3), "the pin '0.weight': 'R' contradicts Layout(zero=3)"),
    ],
)
def test_a_layout_that_a_pin_contradicts_is_named(layout: autopar.Layout, said: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    asked = autopar.Options(pins={"0.weight": "R"}, layout=layout)
    with pytest.raises(OptionsError, match=re.escape(said)):
        autopar.plan(model, (4,), torch.randn(8, 16), options=asked, loss_fn=lambda y: y.sum())


def test_pins_that_contradict_only_together_are_named_together() -> None:
    """Each forbids one of the three ways to place a matrix on one axis, and any two leave the third."""
    forbidden = {"0.weight": "not R", "0.weigh?": "not S(0)", "0.weig*": "not S(1)"}
    two_left_out = {**forbidden, "0.weig*": "not R"}

    def planned(pins: dict[str, str]) -> Plan:
        model, options = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), autopar.Options(pins=pins)
        return autopar.plan(model, (2,), torch.randn(8, 16), options=options, loss_fn=lambda y: y.sum())

    plan = planned({"2.weight": "R", **two_left_out})
    assert short(plan.parameters["0.weight"].weight) == "(S(1))"
    with pytest.raises(OptionsError, match="no placement satisfies all; leave one of them out") as error:
        planned({"2.weight": "R", **forbidden})
    assert all(f"{pattern!r}: {text!r}" in str(error.value) for pattern, text in forbidden.items())
    assert "'2.weight'" not in str(error.value)


def test_a_tied_parameter_is_pinned_under_any_of_its_names() -> None:
    model, batch = Stack(), text()
    plans = [
        autopar.plan(model, (2,), batch, options=autopar.Options(pins={name: "S(1)"}), cluster=CLUSTER)
        for name in ("embed.weight", "head.weight")
    ]
    assert str(plans[0].parameters["embed.weight"]) == str(plans[1].parameters["embed.weight"])
    assert plans[0].predicted.step_seconds == plans[1].predicted.step_seconds
    assert plans[1].pinned == {"head.weight": "S(1)"}
    assert "user" in plans[1].why("head.weight").provenance
    apart = autopar.Options(pins={"embed.weight": "S(1)", "head.weight": "S(0)"})
    with pytest.raises(OptionsError, match=r"'head.weight' and 'embed.weight' are one parameter"):
        autopar.plan(model, (2,), batch, options=apart, cluster=CLUSTER)


def test_dims_of_an_output_that_the_graph_has_otherwise_are_refused() -> None:
    """Of a product of sequences the graph has samples and positions in one dim, which no user sees."""
    model, batch = gpt2(1)

    def pinned(name: str, text: str, **others: str) -> autopar.Plan:
        options = autopar.Options(pins={**others, name: text}, stages=1, microbatches=1)
        return autopar.plan(model, (2,), batch, options=options, cluster=CLUSTER)

    said = (
        r"the pin 'lm_head': 'S\(1\)' counts dims of what the module returns, \[\d+, \d+, 257\], but the plan has that "
        r"as %(\w+) f32\[128, 257\], whose dim 0 is \d+ samples x \d+"
    )
    with pytest.raises(autopar.OptionsError, match=said) as caught:
        pinned("lm_head", "S(1)")
    with pytest.raises(autopar.OptionsError, match=said):  # Whatever else is pinned.
        pinned("lm_head", "S(1)", **{"transformer.wte.weight": "S(0)"})
    named = re.search(said, str(caught.value))
    assert named is not None
    plan = pinned(f"%{named[1]}", "S(1)")
    assert short(plan.strategies[named[1]].outputs[0]) == "(S(1))"
    assert pinned("lm_head", "S(0)") and pinned("transformer.h.0.mlp.c_fc", "S(2)")


class Twins(nn.Module):
    """Two views of a batch, one after the other along dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, other = self.second(torch.relu(self.first(torch.cat([x, y])))).chunk(2)
        return (one - other).square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_that_are_several_times_the_samples_are_no_positions(microbatches: int) -> None:
    """The module returns them so: its pin counts the dims that the graph has."""
    options = autopar.Options(pins={"first": "S(1)"}, stages=1, microbatches=microbatches)
    batch = torch.randn(8, 16), torch.randn(8, 16)
    plan = autopar.plan(Twins(), (2,), batch, options=options, cluster=CLUSTER)
    assert short(plan.outputs["first"]) == "(S(1))"


def test_dims_behind_a_single_sample_are_counted_with_it() -> None:
    """The graph has positions in dim 0, so that what follows would be another dim."""
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(1, 12, 8)
    options = autopar.Options(pins={"0": "S(1)"}, stages=1, microbatches=1)
    with pytest.raises(OptionsError, match=r"counts dims of what the module returns, \[1, 12, 16\]"):
        autopar.plan(model, (2,), batch, options=options, cluster=CLUSTER, loss_fn=lambda y: y.sum())


def test_inputs_without_samples_do_not_say_what_the_samples_of_a_pinned_output_are() -> None:
    """Two of three inputs have one row; the module returns the samples as they are."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return (self.net(x) * scale + shift).square().mean()

    options = autopar.Options(pins={"net": "S(1)"}, stages=1, microbatches=1)
    batch = torch.randn(8, 16), torch.randn(1, 16), torch.randn(1, 16)
    plan = autopar.plan(Scaled(), (2,), batch, options=options, cluster=CLUSTER)
    assert short(plan.outputs["net"]) == "(S(1))"
