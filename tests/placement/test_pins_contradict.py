"""Pins that cannot both be had name each other, and the option that they contradict."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import OptionsError


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
