"""How unevenly routers use experts: measured, stated, and priced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.planner.expert_imbalance import busiest
from tests.ops.test_exchanged_experts import computing_counts, exchanging, one_layer
from tests.ops.test_experts import make

OPTIONS: dict[str, Any] = {"mesh_search": False}


def test_of_the_busiest_device() -> None:
    ids = [torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0, 3]])]
    assert busiest(ids, 4, 4) == pytest.approx(3 / (6 / 4))
    assert busiest(ids, 4, 2) == pytest.approx(4 / 3)
    assert busiest(ids, 4, 1) == 1.0
    assert busiest([torch.zeros(0, 2, dtype=torch.long)], 4, 2) == 1.0


def test_a_router_that_always_takes_the_first_two() -> None:
    model, batch = make("gpt_oss")
    assert 1.0 <= autopar.expert_imbalance(model, batch, 2) < 2.0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.weight.zero_()
            layer.mlp.router.bias.copy_(torch.tensor([2.0, 1.0, 0.0, 0.0]))
    found = [autopar.expert_imbalance(model, batch, devices) for devices in (1, 2, 4)]
    assert found == [1.0, 2.0, 2.0]


def test_what_cannot_be_measured_says_so() -> None:
    with pytest.raises(autopar.OptionsError, match="Linear ran no block of experts"):
        autopar.expert_imbalance(nn.Linear(4, 4), (torch.ones(2, 4),), 2)
    model, batch = make("mixtral")
    with pytest.raises(autopar.OptionsError, match=r"has 4 experts, .* devices=2 and devices=4 do"):
        autopar.expert_imbalance(model, batch, 3)
    for wrong in ("2", None, 0, -1):
        with pytest.raises(autopar.OptionsError, match=r"do not divide among them; devices="):
            autopar.expert_imbalance(model, batch, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0.5, float("nan"), float("inf"), "2", True])
def test_nonsense_is_refused(wrong: Any) -> None:
    with pytest.raises(autopar.OptionsError, match=r"imbalance=.* at least 1"):
        autopar.Options(imbalance=wrong)


def test_it_is_a_factor_of_exchanges_and_of_shared_experts() -> None:
    model, batch = one_layer(1)

    def planned(imbalance: float | None) -> autopar.Plan:
        options = autopar.Options(imbalance=imbalance, **OPTIONS)
        return autopar.plan(model, (4,), batch, cluster=computing_counts(), options=options)

    even, stated, uneven = planned(None), planned(1.0), planned(1.1)
    assert exchanging(even) and exchanging(uneven)
    assert even.predicted.step_seconds == stated.predicted.step_seconds
    first, second = ([line for line in plan.lines if line.kind == "exchange"] for plan in (even, uneven))
    assert [line.seconds for line in second] > [line.seconds for line in first]
    assert uneven.predicted.compute_seconds > even.predicted.compute_seconds
    assert autopar.Plan.from_json(uneven.to_json()).predicted == uneven.predicted
    alone = [
        autopar.plan(model, (1,), batch, cluster=computing_counts(), options=autopar.Options(imbalance=each))
        for each in (1.0, 3.0)
    ]
    assert alone[0].predicted.step_seconds == alone[1].predicted.step_seconds, "one device has all experts"
