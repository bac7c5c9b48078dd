"""Plans say so where devices compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.description import Cluster
from autopar.cluster.presets import PRESETS


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def warnings_of(
    mesh: tuple[int, ...],
    width: int = 32,
    samples: int = 32,
    cluster: str | Cluster = "dgx-a100-80gb",
    **options: object,
) -> list[str]:
    batch = (torch.randn(samples, 16), torch.randn(samples, 1))
    settings = autopar.Options(**options)  # type: ignore[arg-type]
    plan = autopar.plan(Net(width), mesh, batch, cluster=cluster, options=settings)
    assert autopar.Plan.from_json(plan.to_json()).warnings == plan.warnings
    return [warning for warning in plan.warnings if "same" in warning]


def test_a_small_model_says_that_devices_compute_the_same_and_why() -> None:
    (said,) = warnings_of((2, 2))
    assert said.startswith("the 4 devices along axes idle0 and idle1 all compute the same: ")
    assert "(data parallel is priced at " in said and "fewer processes" in said and "calibrate" not in said
    (said,) = warnings_of((4,), stages=2, microbatches=2)
    assert said.startswith("the 2 devices along axis idle of each stage all compute the same: ")


def test_names_of_axes_are_explained_where_they_are_printed() -> None:
    batch = (torch.randn(32, 16), torch.randn(32, 1))
    plan = autopar.plan(Net(32), (2, 2), batch, cluster="dgx-a100-80gb")
    assert "idle0, idle1: axes whose devices compute the same as each other, or nearly\n" in str(plan)
    report = str(autopar.plan_layouts(Net(32), batch, "dgx-a100-80gb", devices=4))
    assert "idle1: axes whose devices compute the same as each other, or nearly\n" in report
    assert "the same as each other" not in str(autopar.plan(Net(32), (1,), batch, cluster="dgx-a100-80gb"))


@pytest.mark.parametrize(
    ("mesh", "width", "samples", "options"),
    [((1,), 32, 32, {}), ((4,), 32, 32, {"zero": 3}), ((4,), 4096, 1 << 16, {}), ((2,), 32, 32, {"stages": 2})],
    ids=["one device", "memory", "large", "stages"],
)
def test_devices_that_have_something_to_do(
    mesh: tuple[int, ...], width: int, samples: int, options: dict[str, object]
) -> None:
    assert warnings_of(mesh, width, samples, **options) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [({"pins": {"layers.0": "R"}}, "these pins"), ({"layout": autopar.Layout(data=2, pipeline=1)}, "this layout")],
)
def test_restrictions_are_the_reason_where_there_are_any(options: dict[str, object], why: str) -> None:
    (said,) = warnings_of((4,), **options)
    assert f"nothing quicker was found under {why}; fewer processes" in said


def test_prices_that_were_not_measured_may_be_the_reason() -> None:
    (said,) = warnings_of((2, 2), cluster=Cluster.from_toml(PRESETS["local"]))
    assert said.endswith("; prices were not measured here, run `autopar calibrate` and plan again")
