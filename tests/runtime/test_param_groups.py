"""Parameter groups as users write them, against torch's optimizer over the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError
from autopar.runtime import ParallelModule
from autopar.runtime.state.param_groups import ParamGroups
from tests.helpers.runtime_tiny import Tiny
from tests.runtime.test_parallel_module import check_weights, on_mesh

Groups = Callable[[nn.Module], Any]


def by_size(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices alone, which is what most groups are made for; one bias is left out."""
    named = [(name, p) for name, p in model.named_parameters() if name != "up.bias"]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def by_name(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [name for name, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},  # The tied weight by both of its names.
        {"params": ["down.bias"], "weight_decay": 0.0, "lr": 0.02},
    ]


def in_pairs(model: nn.Module) -> list[dict[str, Any]]:
    return [{**g, "params": ((f"my.{i}", p) for i, p in enumerate(g["params"]))} for g in by_size(model)]


class Own(torch.optim.SGD):
    """A class that autopar does not know, which steps on the DTensors."""


@pytest.mark.parametrize(
    ("groups", "cls"),
    [(by_size, torch.optim.AdamW), (by_name, Own), pytest.param(in_pairs, torch.optim.SGD, marks=pytest.mark.slow)],
)
def test_groups_are_those_of_torch(groups: Groups, cls: type[torch.optim.Optimizer]) -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        ours, theirs = model.optimizer(cls, params=groups(model), lr=0.05), cls(by_size(reference), lr=0.05)
        schedules = [torch.optim.lr_scheduler.StepLR(side, 1, 0.5) for side in (ours, theirs)]
        for turn in range(4):
            if turn == 1:
                ours.add_param_group({"params": "up.bias", "lr": 0.1})
                theirs.add_param_group({"params": reference.up.bias, "lr": 0.1})
            if turn == 2:
                state = copy.deepcopy(ours.state_dict())
                kept = [{"params": group["param_names"]} for group in ours.param_groups]
                ours = model.optimizer(cls, params=kept, lr=0.7)
                ours.load_state_dict(state)
                schedules[0].optimizer = ours
            model.step(batch), reference(batch)["loss"].backward()
            for side in (ours, theirs, *schedules):
                side.step()
            ours.zero_grad(), theirs.zero_grad()
            check_weights(model, reference)
        names = [name for group in ours.param_groups for name in group["param_names"]]
        assert sorted(names) == sorted(name for name, _ in reference.named_parameters())

    on_mesh((2, 2), work)


def test_parameters_from_before_are_found_and_their_optimizers_refused() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        plain = copy.deepcopy(reference)
        groups, stale = by_size(plain), torch.optim.SGD(plain.parameters(), lr=0.1)
        again = ParallelModule(plain, mesh, model._compile)
        optimizer = again.optimizer(torch.optim.SGD, groups, lr=0.1)
        assert [group["param_names"] for group in optimizer.param_groups] == [
            ["up.weight", "down.weight"],
            ["down.bias"],
        ]
        with pytest.raises(AutoparError, match=r"made before autopar.parallelize.*model\.optimizer\(SGD"):
            stale.step()

    on_mesh((1, 1), work)


def test_what_is_no_group_is_told() -> None:
    wrong: list[tuple[Any, str]] = [
        (["up.weigth"], "no parameter called 'up.weigth'; did you mean .*up.weight"),
        ([("mine", nn.Parameter(torch.ones(3)))], r"'mine', a tensor of shape \[3\], is not a parameter of this model"),
        ([{"params": "up.bias"}, {"params": ["up.bias"]}], "up.bias is in the groups 0 and 1"),
        ([{"params": ["up.weight"]}, {"params": ["head.weight"]}], "up.weight is in the groups 0 and 1"),
        ([{"lr": 0.1}], "a group is a dict with 'params'"),
        ({"up.bias"}, "in a list, whose order stays"),
    ]

    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        for params, message in wrong:
            with pytest.raises(AutoparError, match=message):
                model.optimizer(torch.optim.SGD, params=params, lr=0.1)

    on_mesh((1, 1), work)


def test_a_group_may_be_empty() -> None:
    """As the Trainer's of parameters without decay, where an adapter has none."""
    model = torch.nn.Linear(2, 2)
    groups = ParamGroups(model).resolve([{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}])
    optimizer = torch.optim.AdamW(groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0]
