"""Optimizers of a parallel module: the class asked for, stepping on shards, equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.runtime.launch import run_local
from autopar.runtime.state.optimizer import ELEMENTWISE, make_optimizer
from tests.helpers.marks import slow_but

PLACES = ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(1)], [Replicate(), Replicate()])


def _whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 6, generator=generator) for _ in PLACES]


def _gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(5, 6, generator=generator) for _ in PLACES]


def _train(cls: Any, parameters: list[nn.Parameter], place: Any, make: Any) -> list[torch.Tensor]:
    optimizer = make(cls, [(f"p{i}", p) for i, p in enumerate(parameters)], lr=0.1)
    assert isinstance(optimizer, cls)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        for index, (parameter, gradient) in enumerate(zip(parameters, _gradients(step), strict=True)):
            parameter.grad = place(gradient, index)
        if step == 2:
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def _on_mesh(rank: int, world: int, name: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    cls = getattr(torch.optim, name)

    def place(whole: torch.Tensor, index: int) -> DTensor:
        return distribute_tensor(whole, mesh, PLACES[index])

    parameters = [nn.Parameter(place(whole, index)) for index, whole in enumerate(_whole())]
    trained = _train(cls, parameters, place, make_optimizer)
    optimizer = make_optimizer(cls, [("p", parameters[0])], lr=0.1)
    parameters[0].grad = place(_gradients(0)[0], 0)
    optimizer.step()
    states = [
        type(v).__name__ for v in optimizer.state[parameters[0]].values() if isinstance(v, torch.Tensor) and v.dim()
    ]
    dist.barrier()
    return {"trained": trained, "states": states}


@pytest.mark.parametrize("name", slow_but(["AdamW"], ["AdamW", "SGD", "Adagrad"]))
def test_steps_equal_one_process(name: str) -> None:
    cls = getattr(torch.optim, name)
    expected = _train(cls, [nn.Parameter(w) for w in _whole()], lambda g, _: g, lambda c, named, **k: c(named, **k))
    for found in run_local(_on_mesh, 4, timeout=60, args=(name,)):
        torch.testing.assert_close(found["trained"], expected)
        assert set(found["states"]) <= {"DTensor"}


def test_whole_tensor_optimizers_are_left_alone() -> None:
    optimizer = make_optimizer(torch.optim.Adafactor, [("p", nn.Parameter(torch.zeros(3, 3)))], lr=0.1)
    assert type(optimizer) is torch.optim.Adafactor
    assert torch.optim.Adafactor not in ELEMENTWISE
