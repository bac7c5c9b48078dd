"""A plan for another graph is refused, and the error says where the two part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.description import Cluster
from autopar.errors import PlanMismatchError
from autopar.planner.plan_graph import check_same_graph, compiled_as_planned
from autopar.planner.prepare import Prepared, prepare


class Block(nn.Module):
    def __init__(self, width: int, act: Callable[[torch.Tensor], torch.Tensor], eps: float) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8, eps=eps), nn.Linear(8, width), act
        self.down = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(
        self, *, width: int = 16, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, torch.tanh, 1e-5), Block(width, act, eps)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def prepared(model: nn.Module) -> Prepared:
    return prepare(model, (torch.randn(4, 8),), {}, device="cpu", loss_fn=None, training=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["no stages", "stages"])
def plan(request: pytest.FixtureRequest) -> autopar.Plan:
    """In stages, one computes again what another has computed."""
    fixed = autopar.Options(stages=request.param, microbatches=1)
    return autopar.plan(Model(), (2,), (torch.randn(4, 8),), cluster="dgx-a100-80gb", options=fixed)


def test_the_same_model_is_accepted(plan: autopar.Plan) -> None:
    assert len(check_same_graph(plan, prepared(Model()))) > 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"act": torch.relu},
            r"the plan has aten.tanh.default of f32\[4, 16\] in module blocks.1, this model aten.relu",
        ),
        (
            {"width": 24},
            r"the plan has the param 'blocks.1.up.weight' of f32\[16, 8\], this model the param .* of f32\[24, 8\]",
        ),
        ({"eps": 1e-6}, "Both have the same operations .* a number differs"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(
    plan: autopar.Plan, changes: dict[str, object], said: str
) -> None:
    other = prepared(Model(**changes))  # type: ignore[arg-type]
    with pytest.raises(PlanMismatchError, match=said):
        check_same_graph(plan, other)


def test_a_longer_model_is_refused(plan: autopar.Plan) -> None:
    longer = Model()
    longer.blocks.append(Block(16, torch.tanh, 1e-5))
    with pytest.raises(PlanMismatchError, match=r"The first difference: the plan has .* this model"):
        check_same_graph(plan, prepared(longer))


def test_inputs_that_lack_are_named_before_sizes_of_microbatches() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            y = self.first(x)
            return (y if mask is None else y * mask).square().mean()

    batch = {"x": torch.randn(8, 4), "mask": torch.ones(8, 4)}
    made = autopar.plan(Masked(), (2,), batch, cluster="dgx-a100-80gb", options=autopar.Options(microbatches=2))
    other = prepare(Masked(), (), {"x": batch["x"]}, device="cpu", loss_fn=None, training=True)
    with pytest.raises(PlanMismatchError, match=r"first difference: the plan has the input 'mask'"):
        check_same_graph(made, compiled_as_planned(other, made, autopar.Options(), Cluster.get("dgx-a100-80gb")))
